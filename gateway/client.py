"""What the commands do: ask the gateway that runs on this data directory, or, when none does, open the files.

A running gateway leaves its address in ``DATA/gateway.json`` while it lives; whether it lives is what the lock says.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Collection, Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import urllib3

from gateway import config_files
from gateway.buffer import question, segment
from gateway.forward.dataway import Dataway
from gateway.forward.dead_letters import DeadLetter, DeadLetters
from gateway.forward.resend import Outcome, resend
from gateway.metrics import Meters
from gateway.model import Category, ConfigError, LocumError, StorageError


class AskError(LocumError):
    """The question was understood, and refused: the message says why."""


def query(data_dir: Path, conf_dir: Path, sql: str, limit: int, timeout_s: float) -> dict[str, Any]:
    """The answer to a question in SQL: ``columns``, ``rows``, ``truncated``. Raises ``AskError``, ``StorageError``."""
    gateway = _running(data_dir)
    if gateway is not None:
        return _json(
            gateway.request(
                "POST",
                "/v1/locum/query",
                json={"sql": sql, "limit": limit, "timeout_s": timeout_s},
                timeout=timeout_s + 5,
            )
        )
    _must_exist(data_dir)
    try:
        answer = question.ask_files(data_dir, sql, limit=limit, timeout_s=timeout_s)
    except question.QuestionError as error:
        raise AskError(str(error)) from None
    return answer.as_json()


def status(data_dir: Path, conf_dir: Path) -> dict[str, Any]:
    """The state of the buffer (``buffer``) and of each lane of each sink (``sinks``)."""
    gateway = _running(data_dir)
    if gateway is not None:
        return _json(gateway.request("GET", "/v1/locum/status", timeout=10.0))
    _must_exist(data_dir)
    return {"buffer": asdict(question.status(data_dir)), "sinks": []}


def tap(
    data_dir: Path,
    conf_dir: Path,
    metric: str | None,
    tags: tuple[str, ...],
    category: str | None,
    last: int,
    follow: bool,
    as_json: bool,
) -> Iterator[str]:
    """Points, a line each, as the gateway sends them. Raises ``ConfigError`` when no gateway runs."""
    gateway = _running(data_dir)
    if gateway is None:
        raise ConfigError(f"no gateway runs on {data_dir}; start one with: locum run --data {data_dir}")
    fields: list[tuple[str, str]] = [
        ("last", str(last)),
        ("follow", str(follow).lower()),
        ("json", str(as_json).lower()),
    ]
    fields += [("tag", tag) for tag in tags]
    if metric:
        fields.append(("metric", metric))
    if category:
        fields.append(("category", category))
    answer = gateway.request("GET", "/v1/locum/tap", fields=fields, preload_content=False, timeout=None)
    if answer.status != 200:
        _json(answer)
    pending = b""
    for chunk in answer.stream(65536):
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            if line:  # blank lines only show that the connection lives
                yield line.decode("utf-8", "replace")


def seal(data_dir: Path, timeout_s: float = 600.0) -> None:
    """See to it that all that was accepted by now lies in sealed segments. Raises ``AskError``, ``StorageError``."""
    gateway = _running(data_dir)
    if gateway is not None:
        _json(gateway.request("POST", f"/v1/locum/seal?timeout_s={timeout_s:g}", timeout=timeout_s + 5))
        return
    _must_exist(data_dir)
    question.seal_files(data_dir)


def live_lag_s(data_dir: Path) -> float:
    """How long the oldest live data waits that a sink has not delivered; 0 when no gateway runs."""
    try:
        gateway = _running(data_dir)
        if gateway is None:
            return 0.0
        sinks = _json(gateway.request("GET", "/v1/locum/status/sinks", timeout=10.0))["sinks"]
    except LocumError:  # it starts, stops, or is too busy to answer: that is when it should be left alone
        return float("inf")
    return max((float(sink["lag_s"]) for sink in sinks), default=0.0)


def retry_letters(
    data_dir: Path, conf_dir: Path, ids: Collection[str] | None, timeout_s: float
) -> Iterator[tuple[DeadLetter, Outcome]]:
    """Send dead letters (None: all) to their sinks again. A gateway that runs is not needed and not disturbed. Raises
    ``ConfigError`` where a letter or its sink is not known."""
    settings = config_files.load(conf_dir, data_dir, os.environ)
    letters = DeadLetters(data_dir)
    chosen = list(letters) if ids is None else letters.find(ids)
    stop = threading.Event()
    outlets: dict[tuple[str, Category], Dataway] = {}

    def outlet_of(letter: DeadLetter, category: Category) -> Dataway:
        key = letter.sink, category
        if key not in outlets:
            to = settings.dataway_sink(letter.sink)
            outlets[key] = Dataway(*key, to, letters, Meters(), version("locum"), settings.points.hostname)
        return outlets[key]

    timer = threading.Timer(timeout_s, stop.set)
    timer.daemon = True
    timer.start()
    try:
        yield from resend(letters, chosen, outlet_of, stop)
    finally:
        timer.cancel()
        for outlet in outlets.values():
            outlet.close()


class _Gateway:
    """A running gateway's API."""

    def __init__(self, base: str, token: str | None) -> None:
        self._base = base
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._pool = urllib3.PoolManager(headers=headers, retries=False)

    def request(self, method: str, path: str, **options: Any) -> Any:
        try:
            return self._pool.request(method, self._base + path, **options)
        except urllib3.exceptions.HTTPError as error:
            raise StorageError(
                f"the gateway at {self._base} does not answer ({type(error).__name__}); is it stuck?"
            ) from None


def _running(data_dir: Path) -> _Gateway | None:
    """The gateway that holds the lock of ``data_dir``, or None."""
    if segment.lock_holder(data_dir) is None:
        return None
    try:
        told = json.loads((data_dir / "gateway.json").read_text())
    except (OSError, ValueError):
        raise StorageError(
            f"{data_dir}: a gateway holds the lock and is not ready yet; try again in a moment"
        ) from None
    return _Gateway(told["api"], os.environ.get("LOCUM_RECEIVE_TOKEN"))


def _must_exist(data_dir: Path) -> None:
    if not any((data_dir / name).is_dir() for name in ("segments", "imported")):
        raise ConfigError(f"{data_dir}: no buffer here; name the data directory with --data")


def _json(answer: Any) -> dict[str, Any]:
    """The body of an answer. Raises ``AskError`` with the gateway's own words if it is not a success."""
    try:
        body = json.loads(answer.data)
    except ValueError:
        body = {}
    if answer.status != 200:
        raise AskError(str(body.get("message") or f"the gateway answered {answer.status}"))
    return dict(body)
