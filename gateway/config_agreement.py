"""Whether the settings agree with each other: what only shows when everything is together.

Each function adds errors and notes to the draft, at the place of the setting that one would change.
"""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

from gateway.config import Address, BufferSettings, ReceiveSettings, TraceSettings
from gateway.config_draft import Draft, Origin
from gateway.config_values import written


def check_receive(draft: Draft, receive: ReceiveSettings) -> None:
    """Exposure, addresses, paths and sizes of the receivers."""
    _check_tls(draft, receive)
    _check_listeners(draft, receive)
    _check_paths(draft, receive)
    largest = max(receive.max_request_bytes, receive.max_grpc_request_bytes)
    if receive.max_inflight_bytes < largest:
        draft.note(
            draft.where("receive", "max_inflight_bytes"),
            f"receive.max_inflight_bytes is less than one request may have ({written('_bytes', largest)}); "
            "such a request is taken when it is alone",
        )


def check_buffer(draft: Draft, buffer: BufferSettings) -> None:
    """Retention deletes whole segments, so there has to be room for two."""
    if 0 < buffer.max_bytes < 2 * buffer.segment_bytes:
        draft.error(
            draft.where("buffer", "max_bytes"),
            f"buffer.max_bytes: {written('_bytes', buffer.max_bytes)} has no room for two segments of "
            f"{written('_bytes', buffer.segment_bytes)}; make it larger, or buffer.segment_bytes smaller",
        )


def _check_tls(draft: Draft, receive: ReceiveSettings) -> None:
    if (receive.tls_cert is None) != (receive.tls_key is None):
        present = "tls_cert" if receive.tls_cert else "tls_key"
        draft.error(draft.where("receive", present), "receive.tls_cert and receive.tls_key go together; set both")


def _check_listeners(draft: Draft, receive: ReceiveSettings) -> None:
    """Off loopback only with TLS or a token, or when said aloud; no address twice."""
    is_guarded = receive.allow_insecure or receive.token is not None or receive.tls_cert is not None
    taken: dict[Address, str] = {}
    for name in ("grpc", "http", "api"):
        place = draft.where("receive", name)
        for address in getattr(receive, name):
            if not address.is_loopback and not is_guarded:
                draft.error(
                    place,
                    f"receive.{name}: {address} can be reached from elsewhere; set receive.tls_cert and "
                    "receive.tls_key, or receive.token, or say receive.allow_insecure = true",
                )
            if address.port and address in taken:
                other = taken[address]
                at = draft.where("receive", name if ("receive", name) in draft.origins else other)
                draft.error(at, f"receive.{name}: {address} is taken by receive.{other}; choose another port")
            taken[address] = name


def _check_paths(draft: Draft, receive: ReceiveSettings) -> None:
    paths = {name: getattr(receive, name) for name in ("trace_path", "metric_path", "log_path")}
    for name, path in paths.items():
        if not path.startswith("/") or "?" in path or "#" in path:
            draft.error(draft.where("receive", name), f"receive.{name}: {path!r} has to be a path that begins with /")
        elif list(paths.values()).count(path) > 1 and ("receive", name) in draft.origins:
            draft.error(
                draft.where("receive", name), f"receive.{name}: {path!r} has two meanings; give each its own path"
            )


def check_traces(draft: Draft, traces: TraceSettings) -> None:
    """Say it where a setting is read that nothing acts on."""
    if traces.keep_rare_resource:
        draft.note(
            draft.where("traces", "keep_rare_resource"), "traces.keep_rare_resource has no effect in this version"
        )


def is_dataway(draft: Draft, url: str, origin: Origin) -> bool:
    """Whether this can be the address of a Dataway. The address is never repeated: its token is a secret."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_address = False
    if not is_address or any(character.isspace() for character in url):
        draft.error(origin, "dataway: this is no address; write https://HOST?token=TOKEN")
        return False
    if not parse_qs(parts.query).get("token"):
        draft.note(origin, "dataway: the address has no token; Guance will not take what is sent there")
    return True


def check_proxy(draft: Draft) -> None:
    """Whether this can be the address of a proxy. It may hold a login, so it is not repeated."""
    proxy = draft.values.get(("dataway", "proxy"))
    if not proxy:
        return
    try:
        is_address = urlsplit(proxy).scheme in ("http", "https") and bool(urlsplit(proxy).hostname)
    except ValueError:
        is_address = False
    if not is_address:
        draft.error(draft.where("dataway", "proxy"), "dataway.proxy: this is no proxy; write http://HOST:PORT")
