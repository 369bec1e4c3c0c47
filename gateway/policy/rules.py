"""The whitelist: which attributes of a span come out of its message, and which tags of a metric leave. Pure.

``customer_tags`` names attributes as they are sent (``hw.id``); an entry ``reg:EXPRESSION`` is a regular expression in
Go's syntax (RE2), not anchored, tested against the attribute's name (DataKit 1.84, golden ``t_attr_types_list``).

- Spans: DataKit's public table, then the names, then ``customer_tags_all``, then the expressions. What none of them
  takes stays in the message.
- Metrics: DataKit leaves the whitelist without effect; here it acts where ``customer_tags`` is set and
  ``customer_tags_all`` is not. A series no longer knows where its tags had dots, so a name is compared with its dots
  as underscores, and in an expression a literal dot also stands for an underscore.

Expressions run in RE2, the engine whose syntax Go has: linear in the text, whatever the pattern or the sender.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import re2

from gateway.config import PolicySettings
from gateway.model import ConfigError, Series

_SAME_NAME = [
    "db.system",
    "db.operation",
    "db.name",
    "db.statement",
    "server.address",
    "server.port",
    "net.host.name",
    "net.host.port",
    "network.peer.address",
    "network.peer.port",
    "network.transport",
    "http.method",
    "http.route",
    "http.target",
    "http.scheme",
    "http.url",
    "http.status_code",
    "error.type",
    "url.full",
    "url.scheme",
    "url.path",
    "url.query",
    "client.address",
    "client.port",
    "messaging.system",
    "messaging.operation",
    "messaging.message.id",
    "messaging.destination.name",
    "rpc.service",
    "rpc.system",
    "exception",
    "exception.type",
    "exception.message",
    "exception.stacktrace",
    "container.name",
    "process.pid",
    "project",
    "version",
    "env",
    "host",
    "pod_name",
    "pod_namespace",
]

PUBLIC_KEYS = {name: name.replace(".", "_") for name in _SAME_NAME} | {
    "http.request.method": "http_method",
    "http.response.status_code": "http_status_code",
}
"""Attributes of spans that always come out, and the field that each becomes (DataKit's semconv.go)."""

ALWAYS_KEPT = frozenset({"host", "unit", "le", "quantile"})
"""Tags of metrics that stay under every whitelist: without them points of different meaning would become one."""

_KEYS_REMEMBERED = 8192

Matches = Callable[[str], bool]


@lru_cache(maxsize=1024)
def compile_pattern(expression: str) -> Matches:
    """A test whether ``expression`` (RE2 syntax) matches somewhere in a text.

    Raises ``ConfigError`` with the pattern and the reason; the loader of the settings adds file and line.
    """
    options = re2.Options()
    options.log_errors = False
    try:
        pattern = re2.compile(expression, options)
    except re2.error as error:
        detail = error.args[0] if error.args else "it does not compile"
        reason = detail.decode(errors="replace") if isinstance(detail, bytes) else str(detail)
        raise ConfigError(f"pattern {expression!r}: {reason} (the syntax is RE2, as in Go)") from None
    return lambda text: pattern.search(text) is not None


@dataclass(frozen=True, slots=True)
class Rules:
    """One version of the whitelist, compiled. Safe to share between threads."""

    touches_metrics: bool
    """Whether ``apply`` may change a series at all."""
    span_key: Callable[[str], str | None]
    """The field under which an attribute of a span comes out; None: it stays in the message."""
    keeps_metric_tag: Callable[[str], bool]
    """Whether a tag of a metric leaves."""

    @classmethod
    def compile(cls, settings: PolicySettings) -> Rules:
        """Raises ``ConfigError`` for an expression that does not compile."""
        written = [entry.removeprefix("reg:") for entry in settings.customer_tags if entry.startswith("reg:")]
        names = {entry for entry in settings.customer_tags if entry and not entry.startswith("reg:")}
        patterns = tuple(compile_pattern(expression) for expression in written)
        touches_metrics = bool(settings.customer_tags) and not settings.customer_tags_all
        if not touches_metrics:
            return cls(False, _span_rule(names, patterns, settings.customer_tags_all), lambda tag: True)
        tag_patterns = (*patterns, *_flat_patterns(written))
        return cls(True, _span_rule(names, patterns, False), _tag_rule(names, tag_patterns))

    def apply(self, series: Series) -> Series:
        """``series`` with the tags that may leave; the same object where nothing changes."""
        if not self.touches_metrics:
            return series
        kept = tuple(tag for tag in series.tags if self.keeps_metric_tag(tag[0]))
        return series if len(kept) == len(series.tags) else replace(series, tags=kept)


def _span_rule(names: set[str], patterns: tuple[Matches, ...], keeps_all: bool) -> Callable[[str], str | None]:
    exact = {name: name.replace(".", "_") for name in names} | PUBLIC_KEYS

    def find(key: str) -> str | None:
        found = exact.get(key)
        if found is not None or not key:
            return found
        if keeps_all or any(matches(key) for matches in patterns):
            return key.replace(".", "_")
        return None

    # Senders use few names again and again; the bound is for those who do not.
    return lru_cache(maxsize=_KEYS_REMEMBERED)(find)


def _tag_rule(names: set[str], patterns: tuple[Matches, ...]) -> Callable[[str], bool]:
    kept = ALWAYS_KEPT | {name.replace(".", "_") for name in names}

    def find(tag: str) -> bool:
        return tag in kept or any(matches(tag) for matches in patterns)

    return lru_cache(maxsize=_KEYS_REMEMBERED)(find)


def _flat_patterns(expressions: list[str]) -> list[Matches]:
    """The expressions for tags: what matches ``hw.id`` has to match ``hw_id``."""
    found = []
    for expression in expressions:
        flat = flat_expression(expression)
        if flat != expression:
            try:
                found.append(compile_pattern(flat))
            except ConfigError:  # an exotic class or quotation; the expression as written still counts
                continue
    return found


def flat_expression(expression: str) -> str:
    """``expression`` with every literal dot (``\\.`` or ``.`` in a class) also standing for ``_``.

    A negated class stays as it is: it excludes the dot, and ``_`` is no dot. ``\\Q..\\E`` and ``\\x2e`` stay, too.
    """
    out: list[str] = []
    in_class = negated = False
    at = 0
    while at < len(expression):
        char = expression[at]
        escaped = char == "\\" and at + 1 < len(expression)
        token = expression[at : at + 2] if escaped else char
        if in_class:
            literal_dot = token in (".", "\\.") and not negated
            out.append(token + "_" if literal_dot else token)
            in_class = token != "]"
        elif token == "[":
            in_class, negated = True, expression.startswith("^", at + 1)
            out.append(token)
        else:
            out.append("[._]" if token == "\\." else token)
        at += len(token)
    return "".join(out)
