"""DataKit's HTTP API on 9529, as far as it concerns a gateway, and the state of this one."""

from __future__ import annotations

import ipaddress
import time
from typing import Any, Protocol

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool

from gateway.metrics import Meters
from gateway.model import ConfigError
from gateway.receive.request import token_matches


class Service(Protocol):
    """What the API needs of the gateway."""

    version: str
    hostname: str
    meters: Meters

    def ready(self) -> list[str]: ...
    def reload(self) -> None: ...
    def refresh_meters(self) -> None: ...


def api(service: Service, token: str | None, *routers: APIRouter) -> FastAPI:
    """The application behind the OTLP paths of 9529. ``token``: what senders from elsewhere must bring."""
    app = FastAPI(title="Locum", docs_url=None, redoc_url=None, openapi_url=None)
    began = time.monotonic()
    for router in routers:
        app.include_router(router)

    @app.middleware("http")
    async def only_friends(request: Request, call_next: Any) -> Response:
        """DataKit's rule: the API is for this host; from elsewhere only with the token."""
        peer = request.client.host if request.client else ""
        from_here = not peer or ipaddress.ip_address(peer).is_loopback
        headers, query = dict(request.scope["headers"]), request.scope["query_string"]
        public = request.url.path in ("/v1/ping", "/healthz", "/readyz")
        if not public and not from_here and not (token and token_matches(token, headers, query)):
            return _error(403, "datakit.publicAccessDisabled", "only from this host, or with the gateway's token")
        answered: Response = await call_next(request)
        answered.headers["X-Datakit"] = f"{service.version}/{service.hostname}"
        return answered

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        return _error(error.status_code, "locum.refused", str(error.detail))

    @app.get("/v1/ping")
    async def ping() -> dict[str, Any]:
        uptime_s = int(time.monotonic() - began)
        content = {"version": service.version, "uptime": f"{uptime_s}s", "host": service.hostname, "commit": "locum"}
        return {"content": content}

    @app.get("/metrics")
    async def metrics() -> Response:
        await run_in_threadpool(service.refresh_meters)
        return Response(generate_latest(service.meters.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/healthz")
    async def healthz() -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    @app.get("/readyz")
    async def readyz() -> PlainTextResponse:
        reasons = await run_in_threadpool(service.ready)
        return PlainTextResponse("\n".join(reasons or ["ok"]) + "\n", 503 if reasons else 200)

    @app.post("/v1/reload")
    async def reload() -> JSONResponse:
        try:
            await run_in_threadpool(service.reload)
        except ConfigError as error:
            return _error(400, "locum.config", str(error))
        return JSONResponse({"content": "reloaded"})

    return app


def _error(status: int, code: str, message: str) -> JSONResponse:
    """DataKit's envelope of an error."""
    return JSONResponse({"error_code": code, "message": message}, status)
