"""Delivery to a Dataway: what is sent, how it is answered, and when to try again.

Rules: 2xx is delivered. 408, 429, 5xx, a quota that is used up, a token that is not taken, an address where nobody
takes points (404, 405), redirects and network errors are nobody's points' fault: kept and tried again, for as long as
it takes. Any other 4xx is about the body: it is halved until the offending points are alone, these are laid aside
with the reply, the rest is delivered. Nothing expires, and no time is rewritten.
"""

from __future__ import annotations

import email.utils
import http.client
import logging
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from isal import isal_zlib

from gateway.config import DatawaySettings, mask
from gateway.forward.connections import ConnectionPool
from gateway.forward.dead_letters import DeadLetters
from gateway.forward.package import as_lines, halves
from gateway.forward.sink import Package, Stopped, package_id
from gateway.metrics import Meters
from gateway.model import Category

log = logging.getLogger("locum.forward")

FIRST_DELAY_S, MAX_DELAY_S, MAX_QUOTA_DELAY_S, MAX_RETRY_AFTER_S = 1.0, 60.0, 300.0, 900.0
FAR_S = 0.005
"""A reply that takes longer than this is worth sending several bodies at once."""
_LOG_EVERY_S = 30.0

PROTOBUF = "application/protobuf; proto=com.guance.Point"
LINE_PROTOCOL = "application/line-protocol"


class Answer(Enum):
    """What a reply means for the body."""

    DELIVERED = "delivered"
    LATER = "later"
    QUOTA = "quota"
    SPLIT = "split"


@dataclass(frozen=True, slots=True)
class Reply:
    """A receiver's reply, or why there was none (status 0)."""

    answer: Answer
    cause: str
    status: int = 0
    text: str = ""
    retry_after_s: float | None = None


def judge(status: int, text: str, retry_after: str | None) -> Reply:
    """What a status means (see the module)."""
    if 200 <= status < 300:
        return Reply(Answer.DELIVERED, "ok", status)
    wait_s = retry_after_s(retry_after)
    if status == 403 and "beyondDataUsage" in text:
        return Reply(Answer.QUOTA, "quota", status, text, wait_s)
    if status in (401, 403, 407):
        return Reply(Answer.LATER, "token", status, text, wait_s)
    if status in (404, 405):
        return Reply(Answer.LATER, "address", status, text, wait_s)
    if status in (408, 429) or status >= 500 or status < 400:
        return Reply(Answer.LATER, str(status), status, text, wait_s)
    return Reply(Answer.SPLIT, str(status), status, text)


def retry_after_s(told: str | None) -> float | None:
    """Seconds of a ``Retry-After`` (a number or a date), at most ``MAX_RETRY_AFTER_S``; None where there is none."""
    if not told:
        return None
    try:
        seconds = float(told)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(told).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S) if seconds == seconds else None


class Dataway:
    """The outlet of one lane: packages of one category to one Dataway. Used by that lane's thread."""

    def __init__(
        self,
        name: str,
        category: Category,
        settings: DatawaySettings,
        dead_letters: DeadLetters,
        meters: Meters,
        version: str,
        hostname: str,
    ) -> None:
        self._name = name
        self._category = category
        self._settings = settings
        self._dead_letters = dead_letters
        self._retries = meters.retries
        self._bytes = meters.delivered_bytes.labels(name, category.path)
        self._dead = meters.dead_letters.labels(name, category.path)
        self._url = write_url(settings.url, category)
        self._secrets = [value for _, value in parse_qsl(urlsplit(settings.url).query) if value]
        self._headers = {
            "User-Agent": f"datakit-linux-amd64/locum-{version}/{hostname}",
            "Referer": "DataKit",
            "Content-Type": PROTOBUF if settings.encoding == "protobuf" else LINE_PROTOCOL,
        }
        # line protocol is made of a body just before it is sent, so only protobuf can be packed ahead
        self._compresses = settings.gzip and settings.encoding == "protobuf"
        if settings.gzip:
            self._headers["Content-Encoding"] = "gzip"
        self._connections = ConnectionPool(settings)
        self._workers = ThreadPoolExecutor(settings.connections, thread_name_prefix=f"{name}-{category.path}")
        self._is_far = False
        self._trouble: str | None = None
        self._logged_at = 0.0

    def pack(self, raw: bytes) -> bytes:
        return isal_zlib.compress(raw, 1, wbits=31) if self._compresses else raw

    def _raw(self, package: Package) -> bytes:
        return isal_zlib.decompress(package.body, wbits=31) if self._compresses else package.body

    def open(self) -> dict[str, Any]:
        return {}

    def resume(self, note: dict[str, Any]) -> None:
        """Nothing to undo: the ids are the same, and the receiver can tell."""

    def health(self) -> str | None:
        return self._trouble

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._connections.close()

    def deliver(self, packages: list[Package], oversized: list[Package], stop: threading.Event) -> None:
        for package in oversized:
            reason = f"a point of {len(self._raw(package))} bytes, {self._settings.max_body_bytes} are allowed"
            self._lay_aside(package, reason, Reply(Answer.SPLIT, "too large"))
        # several at once only where the way is long: near by, threads cost more than they gain
        if self._is_far and len(packages) > 1:
            for _ in self._workers.map(lambda package: self._see_through(package, stop), packages):
                pass
        else:
            for package in packages:
                self._see_through(package, stop)

    def _see_through(self, package: Package, stop: threading.Event) -> None:
        """Return when every point of a package is delivered or laid aside. Raises ``Stopped``."""
        body = package.body
        if self._settings.encoding == "line_protocol":
            package, body = self._lines(package)
            if not package.points:
                return
        attempt = 0
        while True:
            if stop.is_set():
                raise Stopped
            reply = self._post(package, body)
            if reply.answer is Answer.DELIVERED:
                self._bytes.inc(len(body))
                self._trouble = None
                return
            if reply.answer is Answer.SPLIT:
                self._trouble = None
                self._split(package, reply, stop)
                return
            attempt += 1
            self._retries.labels(self._name, self._category.path, reply.cause).inc()
            self._note(reply)
            if stop.wait(delay_s(reply, attempt)):
                raise Stopped

    def _lines(self, package: Package) -> tuple[Package, bytes]:
        """A package as line protocol, without the points that cannot be written so: these are laid aside."""
        lines, written, unwritable = as_lines(package.body, self._category)
        for at, point in enumerate(unwritable):
            alone = Package(package_id(package.id, f"unwritable-{at}"), point, 1)
            self._lay_aside(alone, "line protocol has no way to write it", Reply(Answer.SPLIT, "unwritable"))
        left = Package(package.id, written, package.points - len(unwritable))
        return left, isal_zlib.compress(lines, 1, wbits=31) if self._settings.gzip else lines

    def _split(self, package: Package, reply: Reply, stop: threading.Event) -> None:
        """The receiver does not take this body: find out which of its points it is about."""
        if package.points <= 1:
            self._lay_aside(package, "the receiver does not take it", reply)
            return
        for at, (raw, points) in enumerate(halves(self._raw(package))):
            self._see_through(Package(package_id(package.id, at), self.pack(raw), points), stop)

    def _lay_aside(self, package: Package, reason: str, reply: Reply) -> None:
        self._dead_letters.add(
            package.id, self._name, self._category, self._raw(package), package.points, reason, reply.status,
            self._without_secrets(reply.text),
        )  # fmt: skip
        self._dead.inc(package.points)
        log.error(
            "event=dead_letter sink=%s category=%s package=%s status=%d reason=%r",
            self._name, self._category.path, package.id, reply.status, reason,
        )  # fmt: skip

    def _post(self, package: Package, body: bytes) -> Reply:
        headers = self._headers | {"X-Points": str(package.points), "X-Pkg-Id": package.id}
        began = time.monotonic()
        try:
            status, told, text = self._connections.post(self._url, body, headers)
        except (OSError, http.client.HTTPException) as error:
            return Reply(Answer.LATER, "network", text=f"{type(error).__name__}: {error}")
        self._is_far = time.monotonic() - began > FAR_S
        return judge(status, text, told)

    def _note(self, reply: Reply) -> None:
        """Remember why it does not go on, and say it now and then."""
        told = self._without_secrets(reply.text).strip().replace("\n", " ")[:200]
        what = f"answers {reply.status}" if reply.status else "cannot be reached"
        self._trouble = f"{what} ({reply.cause}): {told}" if told else f"{what} ({reply.cause})"
        if time.monotonic() - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = time.monotonic()
            advice = {
                "token": "check the token of the Dataway's address",
                "address": "check the path of the Dataway's address: nothing takes points there; everything is kept",
                "quota": "the workspace's quota is used up; everything is kept until it is raised",
                "network": "everything is kept; check address, proxy and network",
            }.get(reply.cause, "everything is kept and sent again later")
            log.warning(
                "event=not_delivered sink=%s category=%s status=%d cause=%s reply=%r action=%r",
                self._name, self._category.path, reply.status, reply.cause, told, advice,
            )  # fmt: skip

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, mask(secret))
        return text


def write_url(url: str, category: Category) -> str:
    """Where points of a category go: all query parameters of the configured address are kept, as DataKit does."""
    parts = urlsplit(url)
    query = urlencode(parse_qsl(parts.query, keep_blank_values=True))
    return parts._replace(path=f"{parts.path.rstrip('/')}/v1/write/{category.path}", query=query, fragment="").geturl()


def delay_s(reply: Reply, attempt: int) -> float:
    """How long to wait before attempt number ``attempt + 1``: what the receiver asks for, else doubling with jitter."""
    if reply.retry_after_s is not None:
        # a wait of nothing, or a date that is past by our clock, must not become a storm
        return max(reply.retry_after_s, FIRST_DELAY_S / 2) + random.uniform(0, 0.1)
    longest = MAX_QUOTA_DELAY_S if reply.answer is Answer.QUOTA else MAX_DELAY_S
    return min(FIRST_DELAY_S * 2.0 ** min(attempt - 1, 20), longest) * random.uniform(0.5, 1.0)
