"""DataKit's HTTP API on 9529, as far as it concerns a gateway, and the state of this one."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool

from gateway.metrics import Meters
from gateway.model import ConfigError
from gateway.receive.request import first_headers, token_matches

PUBLIC_PATHS = ("/v1/ping", "/healthz", "/readyz")
"""What anybody may ask who reaches the port."""


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
        if request.url.path not in PUBLIC_PATHS:
            headers, query = first_headers(request.scope["headers"]), request.scope["query_string"]
            known = token is not None and token_matches(token, headers, query)
            if not known and not _is_from_here(request):
                return _error(403, "datakit.publicAccessDisabled", "only from this host, or with the gateway's token")
            if not known and _is_foreign_page(headers, service.hostname):
                return _error(403, "locum.foreignPage", "a page of another origin may not ask; use localhost:9529")
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


def _is_from_here(request: Request) -> bool:
    return request.client is None or ipaddress.ip_address(request.client.host).is_loopback


def _is_foreign_page(headers: Mapping[bytes, bytes], hostname: str) -> bool:
    """Whether a browser on this host asks for a page from elsewhere: by its Origin, or by a name of that page's
    making which leads here (DNS rebinding)."""
    asked = headers.get(b"host", b"").decode("latin-1").lower()
    origin = headers.get(b"origin")
    if origin is not None and urlsplit(origin.decode("latin-1")).netloc.lower() != asked:
        return True
    name = asked.rpartition(":")[0] if asked.rpartition(":")[2].isdigit() else asked
    if name in ("", "localhost", hostname.lower()):
        return False
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return True
    return False


def _error(status: int, code: str, message: str) -> JSONResponse:
    """DataKit's envelope of an error."""
    return JSONResponse({"error_code": code, "message": message}, status)
