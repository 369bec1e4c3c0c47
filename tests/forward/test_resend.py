"""Dead letters that go out again: taken, refused again, or kept because nobody answers; and the commands for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway.cli import main
from gateway.config import DatawaySettings
from gateway.forward.dataway import Dataway
from gateway.forward.dead_letters import DeadLetters
from gateway.forward.resend import Outcome, resend
from gateway.forward.stand_in import StandIn
from gateway.metrics import Meters
from gateway.model import Category
from tests.forward.lanes import event
from tests.forward.made import body_of

TOKEN = "tkn_0123456789abcdef0123456789abcdef"


@pytest.fixture
def guance() -> Iterator[StandIn]:
    with StandIn(token=TOKEN) as stand_in:
        yield stand_in


def lay_aside(place: Path, name: str = "dk_1", points: int = 1, reply: str = "no such field") -> DeadLetters:
    letters = DeadLetters(place)
    body = body_of(*(event(number) for number in range(points)))
    letters.add(name, "dataway", Category.LOGGING, body, points, "the receiver does not take it", 400, reply)
    return letters


def sent(letters: DeadLetters, guance: StandIn, stopped: bool = False) -> list[Outcome]:
    to = DatawaySettings(url=guance.url, timeout_s=2.0)
    outlet = Dataway("dataway", Category.LOGGING, to, letters, Meters(), "0", "gateway-1")
    stop = threading.Event()
    if stopped:
        stop.set()
    try:
        return [outcome for _, outcome in resend(letters, list(letters), lambda *_: outlet, stop)]
    finally:
        outlet.close()


def test_what_the_receiver_takes_is_a_dead_letter_no_more(guance: StandIn, tmp_path: Path) -> None:
    letters = lay_aside(tmp_path, points=3)
    assert sent(letters, guance) == [Outcome.DELIVERED]
    assert [each.package_id for each in guance.requests] == ["dk_1"], "the id is the same"
    assert [each.fields["message"] for each in guance.points()] == ["m0", "m1", "m2"]
    assert list(letters) == []


def test_what_it_refuses_again_stays_with_the_new_reply(guance: StandIn, tmp_path: Path) -> None:
    letters = lay_aside(tmp_path, reply="the old reply")
    guance.fail("400")
    assert sent(letters, guance) == [Outcome.REFUSED]
    (letter,) = letters
    assert letter.id == "dk_1"
    assert letter.reply != "the old reply"


def test_of_several_points_only_those_that_are_refused_stay(guance: StandIn, tmp_path: Path) -> None:
    letters = lay_aside(tmp_path, points=2)
    guance.fail("400", 2)  # the whole, then its first half
    assert sent(letters, guance) == [Outcome.REFUSED]
    assert [letter.points for letter in letters] == [1]
    assert "dk_1" not in [letter.id for letter in letters]
    assert [each.fields["message"] for each in guance.points()] == ["m1"]


def test_when_time_is_up_everything_is_as_it_was(guance: StandIn, tmp_path: Path) -> None:
    letters = lay_aside(tmp_path)
    assert sent(letters, guance, stopped=True) == [Outcome.NOT_SENT]
    assert len(list(letters)) == 1


def command(place: Path, *words: str, url: str = "") -> Result:
    conf = place / "conf"
    conf.mkdir(exist_ok=True)
    runner = CliRunner(env={"ENV_DATAWAY": url or None})
    return runner.invoke(main, ["dead-letters", *words, "--conf", str(conf), "--data", str(place)])


def test_the_commands_list_show_retry_and_drop(guance: StandIn, tmp_path: Path) -> None:
    for name in ("dk_1", "dk_2"):
        lay_aside(tmp_path, name)
    listed = command(tmp_path, "list").output
    assert "dk_1" in listed
    assert "no such field" in listed
    assert "2 dead letters, 2 points" in listed
    assert [each["id"] for each in json.loads(command(tmp_path, "list", "--json").output)] == ["dk_1", "dk_2"]
    assert 'message="m0"' in command(tmp_path, "show", "dk_1").output
    (shown,) = json.loads(command(tmp_path, "show", "dk_1", "--json").output)["spelled"]
    assert shown["fields"] == {"message": "m0"}
    retried = command(tmp_path, "retry", "dk_1", url=guance.url)
    assert (retried.exit_code, retried.output) == (0, "dk_1 delivered\n1 delivered, 0 refused, 0 not sent\n")
    guance.fail("400")
    assert command(tmp_path, "retry", "--all", url=guance.url).exit_code == 1
    assert "aborted" in command(tmp_path, "drop", "dk_2").output.lower(), "it asks first"
    assert "1 dead letters with 1 points deleted" in command(tmp_path, "drop", "--all", "--yes").output
    assert list(DeadLetters(tmp_path)) == []


@pytest.mark.parametrize(
    ("words", "url", "said"),
    [
        (["retry", "dk_9"], "", "no dead letter dk_9"),
        (["retry"], "", "--all"),
        (["retry", "--all"], "", "ENV_DATAWAY"),
        (["drop", "dk_1", "--all"], "", "--all"),
    ],
)
def test_what_cannot_be_done_is_said(words: list[str], url: str, said: str, tmp_path: Path) -> None:
    lay_aside(tmp_path)
    told = command(tmp_path, *words, url=url)
    assert told.exit_code != 0
    assert said in told.output + str(told.exception)
    assert len(list(DeadLetters(tmp_path))) == 1
