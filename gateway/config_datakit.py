"""DataKit's own files, read unchanged: ``datakit.conf`` and ``opentelemetry.conf``.

A table here says for each of DataKit's keys which of Locum's settings it is. What DataKit knows and Locum has no use
for is a note, never an error: such a file is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gateway.config_draft import Draft, Origin, Source
from gateway.config_values import KIB, BadValue, boolean, number, size

Setting = tuple[str, str]

_LEAST_BODY_BYTES = 100 * KIB

DATAWAY: dict[str, Setting] = {
    "max_raw_body_size": ("dataway", "max_body_bytes"),
    "timeout_v2": ("dataway", "timeout_s"),
    "content_encoding": ("dataway", "encoding"),
    "gzip": ("dataway", "gzip"),
    "http_proxy": ("dataway", "proxy"),
    "insecure_skip_verify": ("dataway", "tls_insecure"),
}
"""Keys of ``[dataway]`` in datakit.conf, beside ``urls``."""

HTTP_API: dict[str, Setting] = {
    "listen": ("receive", "api"),
    "allowed_cors_origins": ("receive", "cors_origins"),
}
"""Keys of ``[http_api]``."""

INPUT: dict[str, Setting] = {
    "customer_tags": ("policy", "customer_tags"),
    "customer_tags_all": ("policy", "customer_tags_all"),
    "costomer_tags_all": ("policy", "customer_tags_all"),
    "split_service_name": ("traces", "split_service_name"),
    "spilt_service_name": ("traces", "split_service_name"),
    "clean_message": ("traces", "clean_message"),
    "del_message": ("traces", "del_message"),
    "jmarshaler": ("traces", "json_marshaler"),
    "compatible_ddtrace": ("traces", "compatible_ddtrace"),
    "compatible_zhaoshang": ("traces", "compatible_zhaoshang"),
    "keep_rare_resource": ("traces", "keep_rare_resource"),
    "tracing_metric_enable": ("traces", "tracing_metrics"),
    "tracing_metric_tag_whitelist": ("traces", "tracing_metric_tag_whitelist"),
    "tracing_metric_tag_blacklist": ("traces", "tracing_metric_tag_blacklist"),
    "log_max": ("traces", "log_max_kib"),
    "close_resource": ("traces", "close_resource"),
    "tags": ("traces", "tags"),
}
"""Keys of ``[[inputs.opentelemetry]]``; DataKit has two of them misspelt, and both spellings count."""

PATHS: dict[str, Setting] = {
    "trace_api": ("receive", "trace_path"),
    "metric_api": ("receive", "metric_path"),
    "logs_api": ("receive", "log_path"),
}
"""Keys of ``[inputs.opentelemetry.http]``."""

WITHOUT_USE = {
    "expected_headers": "DataKit does not enforce it either; to let in only senders you know, set receive.token",
    "omit_err_status": "DataKit does not read it either",
    "http.http_status_ok": "DataKit does not read it either; success is 200",
    "http.enable": "switch a receiver off with an empty list in [receive] of locum.toml",
    "threads": "nothing waits in memory here: requests wait for the disk",
    "storage": "everything is on disk here before it is answered",
    "pipelines": "DataKit does not read it any more",
    "ignore_attribute_keys": "DataKit does not read it any more",
    "ignore_tags": "DataKit does not read it any more; use customer_tags",
    "dataway.max_retry_count": "here nothing is given up",
    "dataway.retry_delay": "the wait doubles from one attempt to the next, or is what the Dataway asks for",
    "dataway.drop_expired_package_at": "here nothing expires",
    "dataway.timeout": "DataKit does not read it any more; use timeout_v2",
    "dataway.wal": "see [buffer] of locum.toml",
    "http_api.tls": "for TLS set tls_cert and tls_key in [receive] of locum.toml; they hold for gRPC, too",
    "io.auto_timestamp_correction": "here a point keeps its time",
}
"""What to say about some of DataKit's keys beyond that they have no effect."""


def read_datakit(draft: Draft, source: Source, told: Mapping[str, Any]) -> None:
    """``datakit.conf``: the Dataway, the API's address, the host's name, the global tags."""
    dataway = _table(draft, source, told, "dataway")
    urls = dataway.get("urls") or ([dataway["url"]] if dataway.get("url") else None)
    if urls is not None:
        take_urls(draft, urls, source.at("dataway", "urls" if dataway.get("urls") else "url"))
    take(draft, DATAWAY, dataway, source.at("dataway"))
    api = _table(draft, source, told, "http_api")
    take(draft, HTTP_API, api, source.at("http_api"))
    environments = _table(draft, source, told, "environments")
    if environments.get("ENV_HOSTNAME"):
        draft.put("points", "hostname", environments["ENV_HOSTNAME"], source.at("environments", "ENV_HOSTNAME"))
    if told.get("hostname"):
        draft.put("points", "hostname", told["hostname"], source.at("hostname"))
    for name in ("global_tags", "global_host_tags"):
        table = _table(draft, source, told, name)
        draft.put("points", "global_tags", dict(table), source.at(name))
    _note(draft, dataway, {*DATAWAY, "urls", "url"}, source.at("dataway"), "dataway.")
    _note(draft, api, HTTP_API, source.at("http_api"), "http_api.")
    known = {"dataway", "http_api", "environments", "hostname", "global_tags", "global_host_tags"}
    _note(draft, told, known, source.at(), "")


def read_opentelemetry(draft: Draft, source: Source, told: Mapping[str, Any]) -> None:
    """``opentelemetry.conf``: ``[[inputs.opentelemetry]]``, of which the first counts, as DataKit runs but one."""
    inputs = _table(draft, source, told, "inputs")
    found = inputs.get("opentelemetry")
    origin = source.at("inputs", "opentelemetry")
    for name in sorted(inputs.keys() - {"opentelemetry"}):
        draft.note(source.at("inputs", name), f"inputs.{name} is not read; only inputs.opentelemetry is")
    if isinstance(found, list):
        if len(found) > 1:
            draft.note(origin.at(1), f"{len(found)} tables inputs.opentelemetry; the first counts, the others do not")
        found, origin = (found[0], origin.at(0)) if found else (None, origin)
    if not isinstance(found, dict):
        draft.note(origin, "there is no [[inputs.opentelemetry]] in this file; the defaults hold")
        return
    take(draft, INPUT, found, origin)
    http, grpc, sampler = (_table(draft, origin, found, name) for name in ("http", "grpc", "sampler"))
    take(draft, PATHS, http, origin.at("http"))
    take_grpc(draft, grpc, origin.at("grpc"))
    if "sampling_rate" in sampler:
        draft.put("traces", "sampling_rate", sampler["sampling_rate"], origin.at("sampler", "sampling_rate"))
    _note(draft, found, {*INPUT, "http", "grpc", "sampler"}, origin, "")
    _note(draft, http, PATHS, origin.at("http"), "http.")
    _note(draft, grpc, {"addr", "max_payload"}, origin.at("grpc"), "grpc.")
    _note(draft, sampler, {"sampling_rate"}, origin.at("sampler"), "sampler.")


def _table(draft: Draft, origin: Source | Origin, told: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table by its name; an empty one, and an error, if it is something else."""
    found = told.get(name, {})
    if isinstance(found, dict):
        return found
    draft.error(origin.at(name), f"{name}: this has to be a table; write [{name}]")
    return {}


def take(draft: Draft, settings: Mapping[str, Setting], told: Mapping[str, Any], origin: Origin) -> None:
    """Put in what DataKit's keys say. With an empty text DataKit's files leave something out."""
    for name, (section, key) in settings.items():
        if name not in told or told[name] == "":
            continue
        place = origin.at(name)
        value = as_here(draft, key, told[name], place)
        if value is not None:
            draft.put(section, key, value, place)


def as_here(draft: Draft, key: str, value: Any, origin: Origin) -> Any:
    """A value of DataKit's as it would stand in locum.toml; None if it says nothing."""
    if key == "api":
        return both_loopbacks(value)
    if key == "cors_origins" and value == []:
        return None  # DataKit's way to write: everybody
    if key == "timeout_s" and isinstance(value, int) and not isinstance(value, bool):
        return value / 1e9  # Go's time.Duration counts nanoseconds
    if key == "encoding":
        return _encoding(draft, value, origin)
    if key == "max_body_bytes":
        return _body_bytes(draft, value, origin)
    if key == "tls_insecure" and isinstance(value, str):
        return not is_no(value)
    return value


def _encoding(draft: Draft, value: Any, origin: Origin) -> Any:
    """``v1`` or ``v2``; anything else is line protocol to DataKit."""
    told = str(value).strip().lower()
    if told in ("v2", "protobuf"):
        return "protobuf"
    if told not in ("v1", "line-protocol", "line_protocol", "lineproto"):
        draft.note(origin, "content_encoding is neither v1 nor v2; as in DataKit this means v1, the line protocol")
    return "line_protocol"


def _body_bytes(draft: Draft, value: Any, origin: Origin) -> Any:
    try:
        found = size(value)
    except BadValue:
        return value  # the setting's own check says what is wrong
    if found < _LEAST_BODY_BYTES:
        draft.note(origin, f"max_raw_body_size is raised to {_LEAST_BODY_BYTES}, as in DataKit")
    return max(found, _LEAST_BODY_BYTES)


def both_loopbacks(value: Any) -> Any:
    """An address of DataKit's files: its 127.0.0.1 means this host, so IPv6's loopback is served, too."""
    if not isinstance(value, str):
        return [value]
    host, _, port = value.strip().rpartition(":")
    return [f"127.0.0.1:{port}", f"[::1]:{port}"] if host in ("127.0.0.1", "localhost") else [value]


def take_grpc(draft: Draft, told: Mapping[str, Any], origin: Origin) -> None:
    """``addr`` and ``max_payload``; what is not positive means DataKit's 16 MiB."""
    if told.get("addr"):
        draft.put("receive", "grpc", both_loopbacks(told["addr"]), origin.at("addr"))
    if "max_payload" not in told:
        return
    try:
        payload = number(told["max_payload"], int)
    except BadValue as error:
        draft.error(origin.at("max_payload"), f"grpc.max_payload: {error.told(is_secret=False)}")
        return
    draft.put("receive", "max_grpc_request_bytes", payload if payload > 0 else 16 * KIB * KIB, origin.at("max_payload"))


def take_urls(draft: Draft, told: Any, origin: Origin) -> None:
    """The Dataways' addresses; each is a sink of its own."""
    if not isinstance(told, list):
        draft.error(origin, 'dataway.urls: write a list, as ["https://openway.guance.com?token=…"]')
        return
    draft.urls = []
    for index, url in enumerate(told):
        found = draft.convert("dataway", "urls", url, origin.at(index))
        if found:
            draft.urls.append((found.strip(), origin.at(index)))


def _note(draft: Draft, told: Iterable[str], known: Iterable[str], origin: Origin, prefix: str) -> None:
    """Say which keys have no effect here."""
    for name in sorted(set(told) - set(known)):
        why = WITHOUT_USE.get(f"{prefix}{name}")
        draft.note(origin.at(name), f"{prefix}{name} has no effect here{f'; {why}' if why else ''}")


def is_no(told: str) -> bool:
    """Whether a switch is off. DataKit takes any text for yes; who writes "false" does not mean that."""
    try:
        return not boolean(told)
    except BadValue:
        return False
