"""One frozen ``Settings`` out of DataKit's own files, its environment names and ``locum.toml``."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, urlsplit

from gateway.model import ConfigError


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens. ``host`` is a name or an address without brackets."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ReceiveSettings:
    """The receivers. An empty tuple of addresses switches one off."""

    grpc: tuple[Address, ...] = (Address("127.0.0.1", 4317), Address("::1", 4317))
    http: tuple[Address, ...] = (Address("127.0.0.1", 4318), Address("::1", 4318))
    api: tuple[Address, ...] = (Address("127.0.0.1", 9529), Address("::1", 9529))
    trace_path: str = "/otel/v1/traces"
    metric_path: str = "/otel/v1/metrics"
    log_path: str = "/otel/v1/logs"
    max_request_bytes: int = 64 << 20
    """Of one request, after decompression; ``max_payload`` of opentelemetry.conf sets it for gRPC."""
    max_grpc_request_bytes: int = 64 << 20
    max_inflight_bytes: int = 256 << 20
    """Of all requests together that are being read or wait for their commit."""
    max_inflight_requests: int = 512
    read_timeout_s: float = 30.0
    tls_cert: Path | None = None
    tls_key: Path | None = None
    token: str | None = field(default=None, repr=False)
    allow_insecure: bool = False
    cors_origins: tuple[str, ...] = ("*",)
    remote_ip: bool = True
    max_series: int = 2_000_000


@dataclass(frozen=True, slots=True)
class PointSettings:
    """What a point looks like (DESIGN, Points)."""

    parity: Literal["datakit", "strict"] = "datakit"
    host_tag: Literal["gateway", "resource"] = "gateway"
    hostname: str = ""
    global_tags: tuple[tuple[str, str], ...] = ()
    """DataKit's global host tags; ``host`` is among them once the settings are read."""
    version: str = "0.1.0"
    """What ``dk_fingerprint`` (HOST_VERSION) says."""


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """The keys of opentelemetry.conf that shape spans and logs."""

    split_service_name: bool = True
    clean_message: bool = True
    del_message: bool = False
    json_marshaler: Literal["protojson", "gojson", "jsoniter"] = "protojson"
    compatible_ddtrace: bool = False
    compatible_zhaoshang: bool = False
    sampling_rate: float | None = None
    close_resource: tuple[tuple[str, tuple[str, ...]], ...] = ()
    keep_rare_resource: bool = False
    tags: tuple[tuple[str, str], ...] = ()
    tracing_metrics: bool = False
    tracing_metric_tag_whitelist: tuple[str, ...] = ()
    tracing_metric_tag_blacklist: tuple[str, ...] = ("resource",)
    log_max_kib: int = 500


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """The whitelist. Patterns are as written: a name, or ``reg:EXPRESSION``."""

    customer_tags: tuple[str, ...] = ()
    customer_tags_all: bool = False


@dataclass(frozen=True, slots=True)
class BufferSettings:
    segment_bytes: int = 256 << 20
    segment_age_s: float = 3600.0
    max_bytes: int = 0
    """0: no limit but the disk's."""
    max_age_s: float = 0.0
    min_free_disk_bytes: int = 512 << 20
    when_full: Literal["refuse", "drop_oldest"] = "refuse"
    memory_limit_bytes: int = 48 << 20
    threads: int = 1


@dataclass(frozen=True, slots=True)
class DatawaySettings:
    """One Dataway. ``url`` holds the token: print it only through ``masked_url``."""

    url: str = field(repr=False)
    encoding: Literal["protobuf", "line_protocol"] = "protobuf"
    gzip: bool = True
    max_body_bytes: int = 1 << 20
    timeout_s: float = 30.0
    flush_interval_s: float = 1.0
    connections: int = 4
    proxy: str | None = field(default=None, repr=False)
    tls_insecure: bool = False

    @property
    def masked_url(self) -> str:
        """The address without its secrets."""
        return mask_url(self.url)


def mask(secret: str) -> str:
    """A secret so that its owner knows it again: first and last five characters at most."""
    return f"{secret[:5]}****{secret[-5:]}" if len(secret) > 15 else "****"


def mask_url(url: str) -> str:
    """An address without its secrets: no login, and every value of the query masked; ``****`` if it is no address."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "****"
    if not parts.scheme or not parts.netloc:
        return "****"
    query = "&".join(f"{key}={mask(value)}" for key, value in parse_qsl(parts.query, keep_blank_values=True))
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query=query, fragment="").geturl()


@dataclass(frozen=True, slots=True)
class FileSettings:
    """The ``file`` sink: line protocol, one file a category."""

    path: Path
    rotate_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    conf_dir: Path
    data_dir: Path
    receive: ReceiveSettings = ReceiveSettings()
    points: PointSettings = PointSettings()
    traces: TraceSettings = TraceSettings()
    policy: PolicySettings = PolicySettings()
    buffer: BufferSettings = BufferSettings()
    dataways: tuple[DatawaySettings, ...] = ()
    files: tuple[FileSettings, ...] = ()
    notes: tuple[str, ...] = ()
    """What ``locum check`` tells beside errors: keys not known, keys without effect, with file:line."""

    @property
    def dataway_sinks(self) -> dict[str, DatawaySettings]:
        """The Dataways by the names of their sinks: ``dataway``, ``dataway-2``, ..."""
        return {
            "dataway" if number == 1 else f"dataway-{number}": dataway
            for number, dataway in enumerate(self.dataways, 1)
        }

    def dataway_sink(self, name: str) -> DatawaySettings:
        """The Dataway behind a sink. Raises ``ConfigError`` with the names there are."""
        sinks = self.dataway_sinks
        if not sinks:
            raise ConfigError(
                f"{self.conf_dir}: no Dataway to send to; name one in datakit.conf ([dataway] urls) or with ENV_DATAWAY"
            )
        if name not in sinks:
            raise ConfigError(f"{self.conf_dir}: no Dataway is called {name!r}; there is {', '.join(sinks)}")
        return sinks[name]
