"""The API on 9529, over a real socket."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.config import Address, ReceiveSettings
from gateway.metrics import Meters
from gateway.model import ConfigError
from gateway.receive.http import HttpServers, OtlpApp
from gateway.receive.intake import Ticket
from gateway.receive.limits import Budget
from gateway.web import api as web_api
from gateway.web.api import api


@dataclass
class Service:
    version: str = "1.2.3"
    hostname: str = "the-gateway"
    meters: Meters = field(default_factory=Meters)
    reasons: list[str] = field(default_factory=list)
    trouble: str = ""
    reloads: int = 0
    refreshed: threading.Event = field(default_factory=threading.Event)

    def ready(self) -> list[str]:
        return self.reasons

    def reload(self) -> None:
        if self.trouble:
            raise ConfigError(self.trouble)
        self.reloads += 1

    def refresh_meters(self) -> None:
        self.refreshed.set()


class Api:
    def __init__(self, service: Service, token: str | None) -> None:
        settings = ReceiveSettings(token=token)
        done: Future[int] = Future()
        done.set_result(1)
        self.servers = HttpServers(settings)
        app = OtlpApp(settings, lambda *_: Ticket(done), Budget(1 << 20, 10), service.meters, api(service, token))
        (address,) = self.servers.listen("api", (Address("127.0.0.1", 0),), app)
        self.servers.start()
        self.port = address.port

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        told = {name.lower(): value for name, value in answer.getheaders()}
        try:
            return answer.status, told, answer.read()
        finally:
            connection.close()


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def served(service: Service) -> Iterator[Api]:
    running = Api(service, "s3cret")
    yield running
    running.servers.stop(1.0)


def test_a_ping_is_answered_as_datakit_does(served: Api) -> None:
    status, headers, body = served.ask("/v1/ping")
    content = json.loads(body)["content"]
    assert (status, headers["x-datakit"]) == (200, "1.2.3/the-gateway")
    assert set(content) == {"version", "uptime", "host", "commit"}
    assert (content["version"], content["host"], content["uptime"]) == ("1.2.3", "the-gateway", "0s")


def test_otlp_and_the_api_share_the_port(served: Api, service: Service) -> None:
    headers = {"Authorization": "Bearer s3cret", "Content_Type": "application/json"}
    assert served.ask("/otel/v1/metrics", "POST", **headers)[::2] == (200, b"{}")
    body = served.ask("/metrics")[2].decode()
    samples = [sample for family in text_string_to_metric_families(body) for sample in family.samples]
    (answered,) = (
        sample.value
        for sample in samples
        if sample.name == "locum_requests_total" and sample.labels == {"signal": "metrics", "transport": "http"}
    )
    assert answered == 1
    assert service.refreshed.is_set()


def test_every_figure_is_printed(served: Api, service: Service) -> None:
    body = served.ask("/metrics")[2].decode()
    declared = {family.name for family in service.meters.registry.collect()}
    assert declared == {family.name for family in text_string_to_metric_families(body)}


def test_it_is_alive_even_when_it_is_not_ready(served: Api, service: Service) -> None:
    assert served.ask("/healthz")[::2] == (200, b"ok\n")
    assert served.ask("/readyz")[::2] == (200, b"ok\n")
    service.reasons = ["buffer: the disk is full", "dataway: 401"]
    assert served.ask("/healthz")[0] == 200
    assert served.ask("/readyz")[::2] == (503, b"buffer: the disk is full\ndataway: 401\n")


def test_a_reload_says_what_is_wrong(served: Api, service: Service) -> None:
    assert served.ask("/v1/reload", "POST")[0] == 200
    assert service.reloads == 1
    service.trouble = "locum.toml:3:1: no such key"
    status, _, body = served.ask("/v1/reload", "POST")
    assert status == 400
    assert json.loads(body) == {"error_code": "locum.config", "message": "locum.toml:3:1: no such key"}
    assert served.ask("/v1/reload")[0] == 405


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:9529"}, 200),
        ({"Host": "127.0.0.1"}, 200),
        ({"Host": "[::1]:9529"}, 200),
        ({"Host": "The-Gateway:9529"}, 200),
        ({"Host": "localhost:9529", "Origin": "http://localhost:9529"}, 200),
        ({"Host": "localhost:9529", "Origin": "https://evil.example"}, 403),
        ({"Host": "localhost:9529", "Origin": "null"}, 403),
        ({"Host": "evil.example:9529"}, 403),
        ({"Host": "evil.example:9529", "Origin": "http://evil.example:9529"}, 403),
        ({"Host": "evil.example:9529", "Authorization": "Bearer s3cret"}, 200),
    ],
)
def test_a_page_of_another_origin_may_not_ask(
    served: Api, service: Service, headers: dict[str, str], status: int
) -> None:
    assert served.ask("/v1/reload", "POST", **headers)[0] == status
    assert service.reloads == (status == 200)
    assert served.ask("/metrics", **headers)[0] == status


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/ping", {}, 200),
        ("/healthz", {}, 200),
        ("/readyz", {}, 200),
        ("/metrics", {}, 403),
        ("/metrics", {"Authorization": "Bearer wrong"}, 403),
        ("/metrics", {"Authorization": "Bearer s3cret"}, 200),
        ("/metrics?token=s3cret", {}, 200),
        ("/no/such/path", {}, 403),
    ],
)
def test_from_another_host_the_token_is_asked_for(
    served: Api, monkeypatch: pytest.MonkeyPatch, path: str, headers: dict[str, str], status: int
) -> None:
    monkeypatch.setattr(web_api, "_is_from_here", lambda _: False)
    answered, _, body = served.ask(path, **headers)
    assert answered == status
    if status == 403:
        assert json.loads(body)["error_code"] == "datakit.publicAccessDisabled"


def test_without_a_token_nobody_else_may_ask(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_api, "_is_from_here", lambda _: False)
    served = Api(service, None)
    headers: dict[str, Any] = {"Authorization": "Bearer "}
    assert served.ask("/metrics", **headers)[0] == 403
    served.servers.stop(1.0)


def test_what_is_not_there_is_not_found(served: Api) -> None:
    assert served.ask("/no/such/path")[0] == 404
