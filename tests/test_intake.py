"""From bytes to a batch: what is counted, and when."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.buffer.writer import Writer
from gateway.config import Settings
from gateway.intake import Generation, Intake
from gateway.metrics import Meters
from gateway.model import Refusal, Sender, Signal, Wire
from tests.data import case
from tests.otlp.points import parse


def test_losses_are_counted_once_however_often_the_request_was_refused(tmp_path: Path) -> None:
    meters = Meters()
    generation = Generation.of(Settings(tmp_path, tmp_path))
    full = ["the disk"]
    writer = Writer(
        tmp_path, generation.settings.buffer, meters, generation.registry.table,
        segment=1, first_batch=1, gateway_id=b"test", full=lambda: full[0] if full else None,
    )  # fmt: skip
    intake = Intake(generation, writer, meters)
    body = parse(json.dumps(case("14-")).encode()).SerializeToString()
    counter = meters.left_out.labels("metrics", "not_finite")
    for _ in range(3):
        with pytest.raises(Refusal, match="full"):
            intake.accept(Signal.METRICS, Wire.PROTOBUF, body, Sender("192.0.2.7", "http"))
    assert counter._value.get() == 0
    full.clear()
    ticket = intake.accept(Signal.METRICS, Wire.PROTOBUF, body, Sender("192.0.2.7", "http"))
    assert counter._value.get() == 0, "not on disk yet"
    writer.start()
    ticket.done.result(10)
    writer.stop()
    assert counter._value.get() == 3
