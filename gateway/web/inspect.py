"""The routes behind ``locum query``, ``tap``, ``replay``, ``bundle`` and ``buffer status``: for people on this host."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any, Literal, Protocol

from fastapi import APIRouter, HTTPException, Query
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool

from gateway.buffer.question import QuestionError
from gateway.forward.tap import Filter
from gateway.model import Category, LocumError


class Inspected(Protocol):
    """What these routes need of the gateway."""

    def ask(self, sql: str, limit: int, timeout_s: float) -> dict[str, Any]: ...
    def status(self) -> dict[str, Any]: ...
    def sinks(self) -> list[dict[str, Any]]: ...
    def seal(self, timeout_s: float) -> bool: ...
    def tap(self, wanted: Filter, last: int, follow: bool, as_json: bool) -> Iterator[str]: ...


class SqlQuestion(BaseModel):
    sql: str = Field(max_length=1_000_000)
    limit: int = Field(default=10_000, ge=1, le=1_000_000)
    timeout_s: float = Field(default=60.0, gt=0, le=3600)


def routes(gateway: Inspected, max_taps: int = 8) -> APIRouter:
    """The router. At most ``max_taps`` taps at once."""
    router = APIRouter(prefix="/v1/locum")
    taps = asyncio.Semaphore(max_taps)

    @router.post("/query")
    async def query(question: SqlQuestion) -> JSONResponse:
        try:
            answer = await run_in_threadpool(gateway.ask, question.sql, question.limit, question.timeout_s)
        except QuestionError as error:
            return JSONResponse({"error_code": "locum.question", "message": str(error)}, 400)
        return JSONResponse(answer)

    @router.get("/status")
    async def status() -> JSONResponse:
        return JSONResponse(await run_in_threadpool(gateway.status))

    @router.get("/status/sinks")
    async def sinks() -> JSONResponse:
        return JSONResponse({"sinks": gateway.sinks()})

    @router.post("/seal")
    async def seal(timeout_s: Annotated[float, Query(gt=0, le=3600)] = 60.0) -> JSONResponse:
        try:
            done = await run_in_threadpool(gateway.seal, timeout_s)
        except (LocumError, TimeoutError) as error:
            return JSONResponse({"error_code": "locum.seal", "message": str(error)}, 503)
        if not done:
            return JSONResponse({"error_code": "locum.seal", "message": f"not sealed within {timeout_s:g} s"}, 503)
        return JSONResponse({"content": "sealed"})

    @router.get("/tap")
    async def tap(
        metric: str = "",
        tag: Annotated[list[str] | None, Query()] = None,
        category: Literal["metric", "tracing", "logging"] | None = None,
        last: Annotated[int, Query(ge=0, le=100_000)] = 0,
        follow: bool = True,
        json: bool = False,
    ) -> StreamingResponse:
        if taps.locked():
            raise HTTPException(503, f"{max_taps} taps are open already")
        wanted = Filter(metric, tuple(_tags(tag or ())), Category[category.upper()] if category else None)
        lines = gateway.tap(wanted, last, follow, json)
        return StreamingResponse(_stream(lines, taps), media_type="application/x-ndjson" if json else "text/plain")

    return router


def _tags(pairs: list[str] | tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise HTTPException(400, f"tag {pair!r}: write KEY=VALUE")
        yield key, value


async def _stream(lines: Iterator[str], taps: asyncio.Semaphore) -> AsyncIterator[bytes]:
    """Each line with a line's end. An empty one becomes a blank line that shows the reader is still there."""
    async with taps:
        close: Callable[[], None] | None = getattr(lines, "close", None)
        try:
            async for line in iterate_in_threadpool(lines):
                yield f"{line}\n".encode()
        finally:
            if close is not None:
                close()
