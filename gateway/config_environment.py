"""DataKit's names in the environment.

DataKit reads them only in containers; Locum always does, over the files. What DataKit takes as JSON is JSON here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gateway.config_datakit import PATHS, as_here, is_no, take, take_grpc, take_urls
from gateway.config_draft import Draft, Origin, Source
from gateway.config_values import BadValue, from_json, nearest, scalar, tags

Take = Callable[[Draft, str, Origin], None]


def read_environment(draft: Draft, environ: Mapping[str, str]) -> None:
    """DataKit's names in the environment. An empty value is none."""
    for name, take_one in ENVIRONMENT.items():
        if environ.get(name):
            origin = Source(f"environment {name}").at()
            try:
                take_one(draft, environ[name], origin)
            except BadValue as error:
                draft.error(origin, error.told(is_secret=name in _SECRET_NAMES))
    for name in sorted(environ.keys() - ENVIRONMENT.keys()):
        if name.startswith(_PREFIXES) and environ[name]:
            advice = "" if name in _KNOWN_TO_DATAKIT else f"; {nearest(name, ENVIRONMENT)}"
            draft.note(f"environment {name}", f"it has no effect here{advice}")


def _setting(section: str, key: str, change: Callable[[str], Any] = lambda told: told) -> Take:
    """What a name does that says one setting."""

    def take_one(draft: Draft, told: str, origin: Origin) -> None:
        value = as_here(draft, key, change(told), origin)
        if value is not None:
            draft.put(section, key, value, origin)

    return take_one


def _urls(draft: Draft, told: str, origin: Origin) -> None:
    take_urls(draft, [url for url in told.split(",") if url.strip()], origin)


def _grpc(draft: Draft, told: str, origin: Origin) -> None:
    take_grpc(draft, _object(told), origin)


def _http(draft: Draft, told: str, origin: Origin) -> None:
    take(draft, PATHS, _object(told), origin)


def _global_tags(draft: Draft, told: str, origin: Origin) -> None:
    draft.put("points", "global_tags", tags(told), origin)


def _cluster(draft: Draft, told: str, origin: Origin) -> None:
    draft.put("points", "global_tags", {"cluster_name_k8s": told}, origin)


def _object(told: str) -> dict[str, Any]:
    found = from_json(told)
    if not isinstance(found, dict):
        raise BadValue(told, 'write a JSON object, as {"addr": "127.0.0.1:4317"}')
    return found


def _texts(told: str) -> dict[str, str]:
    return {name: scalar(value) for name, value in _object(told).items()}


ENVIRONMENT: dict[str, Take] = {
    "ENV_DATAWAY": _urls,
    "ENV_DATAWAY_TIMEOUT": _setting("dataway", "timeout_s"),
    "ENV_DATAWAY_CONTENT_ENCODING": _setting("dataway", "encoding"),
    "ENV_DATAWAY_MAX_RAW_BODY_SIZE": _setting("dataway", "max_body_bytes"),
    "ENV_DATAWAY_DISABLE_GZIP": _setting("dataway", "gzip", is_no),
    "ENV_DATAWAY_HTTP_PROXY": _setting("dataway", "proxy"),
    "ENV_DATAWAY_TLS_INSECURE": _setting("dataway", "tls_insecure"),
    "ENV_HTTP_LISTEN": _setting("receive", "api"),
    "ENV_HTTP_ALLOWED_CORS_ORIGINS": _setting("receive", "cors_origins"),
    "ENV_K8S_NODE_NAME": _setting("points", "hostname"),
    "ENV_K8S_CLUSTER_NODE_NAME": _setting("points", "hostname"),
    "ENV_HOSTNAME": _setting("points", "hostname"),
    "ENV_GLOBAL_TAGS": _global_tags,
    "ENV_GLOBAL_HOST_TAGS": _global_tags,
    "ENV_CLUSTER_NAME_K8S": _cluster,
    "ENV_INPUT_OTEL_CUSTOMER_TAGS": _setting("policy", "customer_tags", from_json),
    "ENV_INPUT_OTEL_CUSTOMER_TAGS_ALL": _setting("policy", "customer_tags_all"),
    "ENV_INPUT_OTEL_GRPC": _grpc,
    "ENV_INPUT_OTEL_HTTP": _http,
    "ENV_INPUT_OTEL_TAGS": _setting("traces", "tags", _texts),
    "ENV_INPUT_OTEL_CLOSE_RESOURCE": _setting("traces", "close_resource", _object),
    "ENV_INPUT_OTEL_SAMPLER": _setting("traces", "sampling_rate"),
    "ENV_INPUT_OTEL_KEEP_RARE_RESOURCE": _setting("traces", "keep_rare_resource"),
    "ENV_INPUT_OTEL_DEL_MESSAGE": _setting("traces", "del_message"),
    "ENV_INPUT_OTEL_COMPATIBLE_DDTRACE": _setting("traces", "compatible_ddtrace"),
    "ENV_INPUT_OTEL_COMPATIBLE_DD_TRACE": _setting("traces", "compatible_ddtrace"),
    "ENV_INPUT_OTEL_SPLIT_SERVICE_NAME": _setting("traces", "split_service_name"),
    "ENV_INPUT_OTEL_CLEAN_MESSAGE": _setting("traces", "clean_message"),
    "ENV_INPUT_OTEL_TRACING_METRIC_ENABLE": _setting("traces", "tracing_metrics"),
    "ENV_INPUT_OTEL_TRACING_METRIC_TAG_WHITELIST": _setting("traces", "tracing_metric_tag_whitelist", from_json),
    "ENV_INPUT_OTEL_TRACING_METRIC_TAG_BLACKLIST": _setting("traces", "tracing_metric_tag_blacklist", from_json),
}
"""DataKit's names that mean something here, in the order in which they are read: the later wins."""

_SECRET_NAMES = {"ENV_DATAWAY", "ENV_DATAWAY_HTTP_PROXY"}
_PREFIXES = ("ENV_DATAWAY_", "ENV_INPUT_OTEL_", "ENV_IO_", "ENV_HTTP_", "ENV_GLOBAL_", "ENV_SINKER_")
_KNOWN_TO_DATAKIT = {
    *(f"ENV_INPUT_OTEL_{name}" for name in ("OMIT_ERR_STATUS", "THREADS", "STORAGE", "EXPECTED_HEADERS")),
    *(f"ENV_DATAWAY_{name}" for name in ("MAX_RETRY_COUNT", "RETRY_DELAY", "ENABLE_SINKER", "ENABLE_HTTPTRACE")),
    *(f"ENV_DATAWAY_{name}" for name in ("MAX_IDLE_CONNS", "MAX_IDLE_CONNS_PER_HOST", "IDLE_TIMEOUT")),
    *(f"ENV_DATAWAY_{name}" for name in ("DROP_EXPIRED_PACKAGE_AT", "NTP_INTERVAL", "NTP_DIFF", "DISABLE_NTP")),
    *(f"ENV_DATAWAY_WAL_{name}" for name in ("CAPACITY", "WORKERS", "MEM_CAPACITY", "PATH", "NO_DROP_CATEGORIES")),
    *(f"ENV_IO_{name}" for name in ("MAX_CACHE_COUNT", "FLUSH_INTERVAL", "FLUSH_WORKERS", "FEED_CHAN_SIZE")),
    *("ENV_IO_AUTO_TIMESTAMP_CORRECTION", "ENV_IO_FILTERS", "ENV_DATAWAY_WAL_FAIL_CACHE_CLEAN_INTERVAL"),
    *("ENV_HTTP_TIMEOUT", "ENV_HTTP_CLOSE_IDLE_CONNECTION", "ENV_HTTP_PUBLIC_APIS", "ENV_HTTP_ENABLE_TLS"),
    *("ENV_HTTP_TLS_CRT", "ENV_HTTP_TLS_KEY", "ENV_GLOBAL_ELECTION_TAGS", "ENV_GLOBAL_ENV_TAGS"),
    "ENV_SINKER_GLOBAL_CUSTOMER_KEYS",
}
"""DataKit's names without a use here: right where they are, so no other name is proposed."""
