"""A gateway in this process, on free ports and directories of its own, with a fake Guance behind it."""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from gateway import config_files
from gateway.app import Gateway
from gateway.config import Settings
from gateway.forward.stand_in import StandIn
from gateway.model import Signal
from gateway.receive.grpc import METHODS

PROTOBUF, JSON = "application/x-protobuf", "application/json"
_METHOD_OF = {signal: method for method, signal in METHODS.items()}
_OWN = """\
[receive]
grpc = ["127.0.0.1:0"]
http = ["127.0.0.1:0"]
api = ["127.0.0.1:0"]

[dataway]
urls = ["{url}"]
flush_interval_s = "20ms"
connections = 1

"""


@dataclass(slots=True)
class Answer:
    status: int
    media_type: str
    body: bytes


@dataclass(slots=True)
class Running:
    """A running gateway, the fake Guance that it sends to, and connections to its three ports."""

    gateway: Gateway
    settings: Settings
    guance: StandIn
    conf_dir: Path
    channel: grpc.Channel
    connections: dict[str, http.client.HTTPConnection]

    def call(self, signal: Signal, body: bytes, **options: Any) -> bytes:
        """Export over gRPC; the answer's message. Raises ``grpc.RpcError``."""
        return bytes(self.channel.unary_unary(_METHOD_OF[signal])(body, timeout=30, **options))

    def post(
        self,
        path: str,
        body: bytes,
        media_type: str = PROTOBUF,
        *,
        port: str = "http",
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """A request to the port of this name (``http`` or ``api``)."""
        connection = self.connections[port]
        connection.request(method, path, body, {"Content-Type": media_type, **(headers or {})})
        response = connection.getresponse()
        return Answer(response.status, response.headers.get_content_type(), response.read())

    def path(self, signal: Signal) -> str:
        """DataKit's path of a signal, as configured."""
        receive = self.settings.receive
        return {
            Signal.METRICS: receive.metric_path,
            Signal.TRACES: receive.trace_path,
            Signal.LOGS: receive.log_path,
        }[signal]


@contextmanager
def running(place: Path, own: str = "", *, version: str = "0.1.0", **files: str) -> Iterator[Running]:
    """A gateway whose ``locum.toml`` ends with ``own``. ``files`` are texts of DataKit's files, by name without
    ``.conf``. ``version`` is what the fingerprint of spans and logs says. It can be reloaded, too."""
    conf_dir, data_dir = place / "conf", place / "data"
    conf_dir.mkdir(parents=True)
    for name, text in files.items():
        (conf_dir / f"{name}.conf").write_text(text)
    with StandIn() as guance:
        write_own(conf_dir, guance, own)

        def load() -> Settings:
            read = config_files.load(conf_dir, data_dir, {})
            return replace(read, points=replace(read.points, version=version))

        settings = load()
        gateway = Gateway(settings, load)
        gateway.start()
        ports = {name: addresses[0].port for name, addresses in gateway.addresses.items()}
        channel = grpc.insecure_channel(
            f"127.0.0.1:{ports['grpc']}",
            options=[("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)],
        )
        connections = {
            name: http.client.HTTPConnection("127.0.0.1", ports[name], timeout=30) for name in ("http", "api")
        }
        try:
            yield Running(gateway, settings, guance, conf_dir, channel, connections)
        finally:
            channel.close()
            for connection in connections.values():
                connection.close()
            gateway.stop()


def write_own(conf_dir: Path, guance: StandIn, own: str) -> None:
    """``locum.toml``: free ports, a fake Guance, and ``own``."""
    (conf_dir / "locum.toml").write_text(_OWN.format(url=guance.url) + own)
