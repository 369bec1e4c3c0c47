"""Where everything stands in a TOML text: line and column of every key and of every element of an array.

``tomllib`` says what a file means, but only for errors of syntax where. A value that is of the wrong kind has its place
found here. The text must be one that ``tomllib`` has read without complaint: then keys, texts, brackets and commas are
all that has to be told apart, and numbers and dates may be passed over as what stands between them.
"""

from __future__ import annotations

import re
import tomllib

Path = tuple[str | int, ...]
"""Keys of tables and numbers in arrays: ``("inputs", "opentelemetry", 0, "customer_tags", 2)``."""

_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_TEXT = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*"{3,5}'
    r"|'''(?:[^']|'(?!''))*'{3,5}"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BARE_VALUE = re.compile(r"[^\s,\]}#]+(?: \d[^\s,\]}#]*)?")


def places(text: str) -> dict[Path, tuple[int, int]]:
    """Line and column, both from 1, of every key and element of a valid TOML text, by its path."""
    return _Scan(text).run()


class _Scan:
    """One way through the text; ``_at`` is where it has come to."""

    def __init__(self, text: str) -> None:
        self._text = text.replace("\r\n", "\n")
        self._at = 0
        self._found: dict[Path, tuple[int, int]] = {}
        self._tables_in: dict[Path, int] = {}
        """How many tables each array of tables (``[[name]]``) has so far."""
        self._line = 1
        self._line_begins = 0
        self._counted = 0

    def run(self) -> dict[Path, tuple[int, int]]:
        inside: Path = ()
        self._blank()
        while self._at < len(self._text):
            if self._text[self._at] == "[":
                inside = self._header()
            else:
                self._pair(inside)
            self._blank()
        return self._found

    def _header(self) -> Path:
        """``[a.b]`` or ``[[a.b]]``: the path of the table that begins."""
        place = self._place()
        many = self._text.startswith("[[", self._at)
        self._at += 2 if many else 1
        path: Path = ()
        for key in self._keys():
            path = (*self._newest(path), key)
            self._found.setdefault(path, place)
        self._at += 2 if many else 1
        if not many:
            return self._newest(path)
        self._tables_in[path] = self._tables_in.get(path, 0) + 1
        self._found[self._newest(path)] = place
        return self._newest(path)

    def _newest(self, path: Path) -> Path:
        """``path``, or its last table where it is an array of tables."""
        count = self._tables_in.get(path)
        return path if count is None else (*path, count - 1)

    def _pair(self, inside: Path) -> None:
        """``a.b = value``."""
        place = self._place()
        path = inside
        for key in self._keys():
            path = (*path, key)
            self._found.setdefault(path, place)
        self._at += 1  # the equals sign
        self._blank()
        self._value(path)

    def _keys(self) -> list[str]:
        """The parts of a dotted key; afterwards ``_at`` is on the sign that ends it."""
        keys = []
        while True:
            self._blank()
            quoted = _TEXT.match(self._text, self._at)
            bare = _BARE_KEY.match(self._text, self._at)
            if quoted:
                keys.append(str(tomllib.loads(f"key = {quoted[0]}")["key"]))
                self._at = quoted.end()
            elif bare:
                keys.append(bare[0])
                self._at = bare.end()
            self._blank()
            if not self._sign("."):
                return keys

    def _value(self, path: Path) -> None:
        if self._sign("["):
            self._elements(path)
        elif self._sign("{"):
            self._blank()
            while not self._sign("}"):
                self._pair(path)
                self._blank()
                self._sign(",")
                self._blank()
        else:
            found = _TEXT.match(self._text, self._at) or _BARE_VALUE.match(self._text, self._at)
            self._at = found.end() if found else self._at + 1  # always forward, whatever the text

    def _elements(self, path: Path) -> None:
        number = 0
        self._blank()
        while not self._sign("]"):
            self._found[(*path, number)] = self._place()
            self._value((*path, number))
            number += 1
            self._blank()
            self._sign(",")
            self._blank()

    def _sign(self, sign: str) -> bool:
        """Step over ``sign`` if it is here. At the end of the text every sign is, so that no loop is endless."""
        if self._at < len(self._text) and not self._text.startswith(sign, self._at):
            return False
        self._at += 1
        return True

    def _blank(self) -> None:
        found = _BLANK.match(self._text, self._at)
        self._at = found.end() if found else self._at

    def _place(self) -> tuple[int, int]:
        newlines = self._text.count("\n", self._counted, self._at)
        if newlines:
            self._line += newlines
            self._line_begins = self._text.rindex("\n", 0, self._at) + 1
        self._counted = self._at
        return self._line, self._at - self._line_begins + 1
