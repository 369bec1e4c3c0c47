"""Builds the gateway out of its parts, starts them in order, stops them in the other. The only place that knows all.

Order of a start: lock, recovery, writer, index, sinks, receivers. A stop goes the other way round: first nobody is
let in any more, then what was let in is written, then the sinks end, each where its cursor says.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

from gateway import config_files, heap, thread_names
from gateway.buffer import question, segment
from gateway.buffer.catalog import Catalog
from gateway.buffer.indexer import Indexer
from gateway.buffer.reader import Follower, follow
from gateway.buffer.record import Record
from gateway.buffer.writer import Writer
from gateway.config import Address, Settings
from gateway.forward import cursor
from gateway.forward.dataway import Dataway
from gateway.forward.dead_letters import DeadLetters
from gateway.forward.encode import Encoder
from gateway.forward.file import LineFile
from gateway.forward.sink import NEXT_BATCHES, Lane, Outlet
from gateway.forward.tap import Filter, Spelling, last_events, live_lines, show
from gateway.intake import Generation, Intake
from gateway.metrics import Meters
from gateway.minutes import Minutes
from gateway.model import Category, ConfigError, Signal, StorageError
from gateway.receive.grpc import GrpcServer
from gateway.receive.http import HttpServers, OtlpApp
from gateway.receive.limits import Budget
from gateway.web.api import api
from gateway.web.inspect import routes

log = logging.getLogger("locum")

STOP_S = 8.0
_SIGNAL_OF = {Category.METRIC: Signal.METRICS, Category.TRACING: Signal.TRACES, Category.LOGGING: Signal.LOGS}


class Gateway:
    """A running gateway on one data directory. ``load`` reads the settings anew for a reload."""

    def __init__(self, settings: Settings, load: Callable[[], Settings]) -> None:
        self.version = package_version("locum")
        self.hostname = settings.points.hostname
        self.meters = Meters()
        self.addresses: dict[str, list[Address]] = {}
        self._settings = settings
        self._load = load
        self._cleanup = ExitStack()
        self._lanes: list[Lane] = []
        self._reloading = threading.Lock()

    def start(self) -> None:
        """Raises ``ConfigError`` or ``StorageError``; then nothing is left running."""
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        settings, data_dir = self._settings, self._settings.data_dir
        self._cleanup.enter_context(segment.lock(data_dir))
        self._gateway_id = segment.gateway_id(data_dir)
        self._dead_letters = DeadLetters(data_dir)
        self._catalog = Catalog(data_dir, settings.buffer, self.meters)
        self._cleanup.callback(self._catalog.close)
        generation = Generation.of(settings)
        self._start_buffer(generation)
        self._intake = Intake(generation, self._writer, self.meters)
        self._start_lanes(settings, generation)
        minutes = Minutes(self._intake)
        minutes.start()
        self._cleanup.callback(minutes.stop)
        self._start_receivers(settings)
        self._announce()

    def _start_buffer(self, generation: Generation) -> None:
        settings, data_dir = self._settings, self._settings.data_dir
        try:
            recovered = self._catalog.recover()
            delivered = [cursor.read(path).delivered for path in (data_dir / "cursors").glob("*.json")]
            self._writer = Writer(
                data_dir,
                settings.buffer,
                self.meters,
                generation.registry.table,
                segment=recovered.next_segment,
                first_batch=max([recovered.next_batch, *(batch + 1 for batch in delivered)]),
                gateway_id=self._gateway_id.encode(),
                on_roll=self._on_roll,
                full=self._full,
            )
        except OSError as error:
            raise StorageError(
                f"{data_dir}: {error.strerror or error}; check the disk, or name another with --data"
            ) from None
        self._indexer = Indexer(
            self._catalog,
            self._writer,
            settings.buffer,
            self.meters,
            recovered.closed,
            needed=self._needed,
            delivered_through=self._delivered_through,
        )
        self._writer.start()
        self._cleanup.callback(self._writer.stop)
        self._indexer.start()
        self._cleanup.callback(self._indexer.stop)
        self._cleanup.callback(lambda: self._stop_lanes(STOP_S / 2))

    def _start_lanes(self, settings: Settings, generation: Generation) -> None:
        """A lane for each category of each sink, every one from its own cursor."""
        rules = generation.rules
        lanes: list[Lane] = []
        look = f"{settings.points.parity}/{settings.policy!r}"
        for name, interval_s, max_body_bytes, encoding, outlet in self._outlets(settings):
            for category in Category:
                encoder = Encoder(
                    rules.apply if rules.touches_metrics else None,
                    settings.points.parity,
                    generation.registry.table,
                    max_body_bytes,
                )
                lanes.append(
                    Lane(
                        name,
                        category,
                        lambda after, signal=_SIGNAL_OF[category]: self._follow(after, signal),  # type: ignore[misc]
                        outlet(category),
                        encoder,
                        settings.data_dir / "cursors" / f"{name}-{category.path}.json",
                        f"{look}/{encoding}/{max_body_bytes}",
                        self.meters,
                        self._gateway_id,
                        interval_s,
                    )
                )
        self._lanes = lanes
        for lane in lanes:
            lane.start()
        thread_names.show()

    def _outlets(self, settings: Settings) -> Iterator[tuple[str, float, int, str, Callable[[Category], Outlet]]]:
        """Name, flush interval, size of a body, encoding and maker of every sink that is configured."""
        letters, meters = self._dead_letters, self.meters
        for name, dataway in settings.dataway_sinks.items():

            def to_dataway(category: Category, name: str = name, dataway: Any = dataway) -> Outlet:
                return Dataway(name, category, dataway, letters, meters, self.version, self.hostname)

            yield name, dataway.flush_interval_s, dataway.max_body_bytes, dataway.encoding, to_dataway
        for number, file in enumerate(settings.files, 1):
            name = "file" if number == 1 else f"file-{number}"

            def to_file(category: Category, name: str = name, file: Any = file) -> Outlet:
                return LineFile(name, category, file, letters, meters)

            yield name, 1.0, 1 << 20, "line_protocol", to_file

    def _stop_lanes(self, deadline_s: float) -> None:
        until = time.monotonic() + deadline_s
        for lane in self._lanes:
            lane.ask_to_stop()
        for lane in self._lanes:
            lane.stop(max(0.1, until - time.monotonic()))

    def _start_receivers(self, settings: Settings) -> None:
        receive = settings.receive
        accept = self._intake.accept
        budget = Budget(receive.max_inflight_bytes, receive.max_inflight_requests)
        servers = HttpServers(receive)
        web = api(self, receive.token, routes(self))
        self.addresses["http"] = servers.listen("http", receive.http, OtlpApp(receive, accept, budget, self.meters))
        self.addresses["api"] = servers.listen("api", receive.api, OtlpApp(receive, accept, budget, self.meters, web))
        grpc_server = GrpcServer(receive, accept, budget, self.meters)
        self.addresses["grpc"] = grpc_server.start()
        self._cleanup.callback(lambda: grpc_server.stop(STOP_S / 4))
        servers.start()
        thread_names.show()
        self._cleanup.callback(lambda: servers.stop(STOP_S / 4))

    def _announce(self) -> None:
        """Leave word where the commands find this gateway."""
        path = self._settings.data_dir / "gateway.json"
        scheme = "https" if self._settings.receive.tls_cert else "http"
        told = {"pid": os.getpid(), "api": f"{scheme}://{self.addresses['api'][0]}" if self.addresses["api"] else ""}
        segment.write_file(path, json.dumps(told).encode())
        self._cleanup.callback(lambda: path.unlink(missing_ok=True))

    def stop(self) -> None:
        """Stop every part. What was acknowledged is on disk; what was not delivered is, later."""
        self._cleanup.close()

    def reload(self) -> None:
        """Read the configuration again: policy, meaning and sinks change; addresses and the buffer's place do not.

        No request is dropped: those that are being read end with the old settings, and the sinks go on from their
        cursors. Raises ``ConfigError``, and then everything stays as it was.
        """
        with self._reloading:
            settings = self._load()
            before, generation = self._intake.generation, Generation.of(settings)
            self._intake.generation = generation
            self._stop_lanes(STOP_S)
            self._start_lanes(settings, generation)
            self._intake.submit_tracing_metrics(before)
            self._settings = settings
            log.info("event=reloaded sinks=%d", len(settings.dataways) + len(settings.files))

    def ready(self) -> list[str]:
        """Why this gateway should not be counted on right now; empty when it should."""
        reasons = []
        stuck = self._indexer.full() or self._writer.trouble
        if stuck is not None:
            reasons.append(f"buffer: {stuck}")
        reasons += [
            f"{lane.sink}/{lane.category.path}: {trouble}"
            for lane in self._lanes
            if (trouble := lane.health()) is not None
        ]
        return reasons

    def refresh_meters(self) -> None:
        """Set the gauges that are looked up, not counted."""
        registry = self._intake.generation.registry
        self.meters.series.set(len(registry))
        newest = self._writer.committed().batch
        for lane in self._lanes:
            told = lane.progress()
            self.meters.sink_lag_batches.labels(told.sink, told.category).set(max(0, newest - told.delivered))
            self.meters.sink_lag_s.labels(told.sink, told.category).set(_age_s(told.oldest_ns))

    def ask(self, sql: str, limit: int, timeout_s: float) -> dict[str, Any]:
        """Answer a question over everything that is acknowledged by now. Raises ``QuestionError``."""
        answer = question.ask(self._catalog, sql, limit=limit, timeout_s=timeout_s, catch_up=self._indexer.catch_up)
        return answer.as_json()

    def status(self) -> dict[str, Any]:
        """The buffer and the sinks, for people."""
        newest = self._writer.committed().batch
        state = asdict(question.status(self._settings.data_dir)) | {"newest_batch": newest}
        return {"buffer": state | {"full": self._indexer.full() or "no"}, "sinks": self.sinks()}

    def sinks(self) -> list[dict[str, Any]]:
        """How far each lane of each sink has come."""
        newest = self._writer.committed().batch
        return [
            asdict(told) | {"lag_batches": max(0, newest - told.delivered), "lag_s": _age_s(told.oldest_ns)}
            for lane in self._lanes
            for told in (lane.progress(),)
        ]

    def seal(self, timeout_s: float) -> bool:
        """Seal what is open, and wait until all that was accepted before lies in sealed segments; whether it came about
        in time. Raises ``StorageError`` where no new segment can be begun."""
        until = time.monotonic() + timeout_s
        following = self._writer.roll().result(timeout_s)
        while any(
            each.state is segment.State.OPEN and each.number < following
            for each in segment.segments(self._settings.data_dir)
        ):
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True

    def tap(self, wanted: Filter, last: int, follow_on: bool, as_json: bool) -> Iterator[str]:
        """Lines for ``locum tap``: the last points first, then those that come."""
        generation = self._intake.generation
        newest = self._writer.committed().batch
        if last:
            for event in self._last(generation, wanted, last, newest):
                yield show(event, as_json)
        if not follow_on:
            return
        follower = self._follow(newest, None)
        spelling = Spelling(generation.rules.apply, generation.settings.points.parity, wanted)
        try:
            yield from live_lines(lambda: follower.next(1.0), spelling, as_json)
        finally:
            follower.close()

    def _last(self, generation: Generation, wanted: Filter, count: int, newest: int) -> list[Any]:
        """The last points that a filter takes, looking further and further back."""
        found: list[Any] = []
        back = 64
        while True:
            follower = self._follow(max(0, newest - back), None)
            spelling = Spelling(generation.rules.apply, generation.settings.points.parity, wanted)
            found = last_events(_until(follower, newest), spelling, count)
            follower.close()
            if len(found) >= count or back >= newest or back >= 65536:
                return found
            back *= 8

    def _follow(self, after_batch: int, signal_wanted: Signal | None) -> Follower:
        return follow(self._settings.data_dir, self._writer, after_batch, signal_wanted)

    def _on_roll(self, closed: int, opened: int) -> None:
        # a batch that still waits needs its series; there is another roll
        waiting = self._writer.pending_bytes > 0
        forgotten = 0 if waiting else self._intake.generation.registry.sweep()
        log.info("event=segment_closed segment=%d next=%d series_forgotten=%d", closed, opened, forgotten)

    def _full(self) -> str | None:
        """Why nothing may be written now. (The indexer is there before the first request, but after the writer.)"""
        return self._indexer.full()

    def _needed(self, first: int, last: int) -> bool:
        """Whether a sink is in the middle of these batches, and may have to make the same bodies of them again."""
        # before the lanes have begun, and of a sink that was taken away and may come back, their files tell it
        running = {lane.cursor_path for lane in self._lanes}
        reaches = [lane.reach for lane in self._lanes]
        reaches += [
            (told.delivered + 1, (told.window.last if told.window else told.delivered) + NEXT_BATCHES)
            for path in (self._settings.data_dir / "cursors").glob("*.json")
            if path not in running and ((told := cursor.read(path)).window or not running)
        ]
        return any(begin <= last and first <= end for begin, end in reaches)

    def _delivered_through(self) -> int | None:
        """The last batch that every sink is done with; None where there is no sink."""
        if not (self._settings.dataways or self._settings.files):
            return None
        return min((lane.delivered for lane in self._lanes), default=0)


def _until(follower: Follower, last_batch: int) -> Iterator[Record]:
    """What there is up to a batch."""
    while follower.position < last_batch:
        record = follower.next(0.0)
        if record is None:
            return
        yield record


def _age_s(time_ns: int) -> float:
    return max(0.0, (time.time_ns() - time_ns) / 1e9) if time_ns else 0.0


def run(conf_dir: Path, data_dir: Path, log_level: str, environ: Mapping[str, str] = os.environ) -> None:
    """Run until SIGTERM or Ctrl-C; print one line when ready. Raises ``ConfigError``, ``StorageError``."""
    _log_to_stderr(log_level)
    heap.keep_buffers()

    def load() -> Settings:
        return config_files.load(conf_dir, data_dir, environ)

    settings = load()
    for note in settings.notes:
        log.info("event=config_note note=%r", note)
    stop, reload = threading.Event(), threading.Event()
    wake = threading.Event()

    def on_signal(number: int, _: object) -> None:
        (reload if number == signal.SIGHUP else stop).set()
        wake.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)
    gateway = Gateway(settings, load)
    gateway.start()
    print(ready_line(gateway.addresses), flush=True)
    try:
        while not stop.is_set():
            wake.wait()
            wake.clear()
            if reload.is_set():
                reload.clear()
                try:
                    gateway.reload()
                except ConfigError as error:
                    log.error("event=reload_failed error=%r action=the old settings stay", str(error))
    finally:
        gateway.stop()


def ready_line(addresses: Mapping[str, list[Address]]) -> str:
    """What is printed when everything runs: each port by name."""
    parts = [f"{name}={','.join(map(str, found))}" for name, found in sorted(addresses.items()) if found]
    return " ".join(["locum ready", *parts])


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S%z",
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
