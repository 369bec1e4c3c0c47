"""Dead letters go out again, when what made the receiver refuse them is mended: one by one, under the same ids."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum

from gateway.forward.dead_letters import DeadLetter, DeadLetters
from gateway.forward.sink import Outlet, Package, Stopped
from gateway.model import Category


class Outcome(StrEnum):
    DELIVERED = "delivered"
    """The receiver took all of it; the letter is gone."""
    REFUSED = "refused"
    """It did not take some points, again: these are dead letters, with its new reply."""
    NOT_SENT = "not sent"
    """Time was up before an answer came; the letter is as it was."""


def resend(
    letters: DeadLetters,
    chosen: Iterable[DeadLetter],
    outlet_of: Callable[[DeadLetter, Category], Outlet],
    stop: threading.Event,
) -> Iterator[tuple[DeadLetter, Outcome]]:
    """Send letters again and say what became of each. ``outlet_of`` gives the outlet of a letter; the caller closes
    it. Once ``stop`` is set the rest is not sent. Raises ``OSError``."""
    for letter in chosen:
        raw = letter.raw()
        outlet = outlet_of(letter, Category[letter.category.upper()])
        path = letters.path(letter)
        file, refused = path.stat().st_ino, letters.added
        try:
            outlet.deliver([Package(letter.id, outlet.pack(raw), letter.points)], [], stop)
        except Stopped:
            yield letter, Outcome.NOT_SENT
            continue
        if path.stat().st_ino == file:  # otherwise it was laid aside again, with the new reply
            letters.drop(letter)
        yield letter, Outcome.REFUSED if letters.added > refused else Outcome.DELIVERED
