"""Every key and element of a TOML text is found where it stands."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.config_places import places

TOML = '''\
top = 1 # a comment with [brackets] = and "quotes"
"quoted key" = 'a # b'
date = 1979-05-27 07:32:00Z
dotted . "k.ey" = true
multi = """
[not.a.table]
x = "y" \\""" z
"""
raw = \'\'\'
[nor.this] ''
\'\'\'
[a.b] # header
list = [ 1, # one, with ] and "
  "two, ]", [3, {x = 4, y = [5]}],
  """six
  """, 7]
inline = { k = "v", "q" = { deep = [1] } }
[[many]]
n = 1
[many.sub]
n = 2
[[many]]
n = 3
[[many.inner]]
n = 4
[[many.inner]]
n = 5
'''


def walk(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Every key and element below ``value``."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*path, key), inner
        yield from walk(inner, (*path, key))


def test_every_key_and_element_has_its_place() -> None:
    found = places(TOML)
    told = tomllib.loads(TOML)
    assert {path for path, _ in walk(told)} == found.keys()
    lines = TOML.split("\n")

    def rest(*path: str | int) -> str:
        line, column = found[path]
        return lines[line - 1][column - 1 :]

    assert rest("top").startswith("top = 1")
    assert rest("quoted key").startswith('"quoted key"')
    assert rest("dotted", "k.ey").startswith("dotted . ")
    assert rest("a", "b", "list", 1).startswith('"two, ]"')
    assert rest("a", "b", "list", 2, 1, "y", 0).startswith("5]")
    assert rest("a", "b", "list", 3).startswith('"""six')
    assert rest("a", "b", "list", 4).startswith("7]")
    assert rest("a", "b", "inline", "q", "deep", 0).startswith("1]")
    assert found["many",] == (18, 1)
    assert found["many", 0] == (18, 1) and found["many", 1] == (22, 1)
    assert rest("many", 0, "sub", "n") == "n = 2"
    assert rest("many", 1, "n") == "n = 3"
    assert rest("many", 1, "inner", 1, "n") == "n = 5"


KEYS = st.one_of(
    st.from_regex(r"[A-Za-z0-9_-]{1,6}", fullmatch=True),
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=5),
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\x7f"), max_size=8)
VALUES = st.recursive(
    st.one_of(st.integers(-(2**63), 2**63 - 1), st.booleans(), st.floats(allow_nan=False), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=12,
)
BLANKS = st.sampled_from(["", " ", "\t"])


@st.composite
def documents(draw: st.DrawFn) -> str:
    """A TOML text in many styles: texts of four kinds, arrays over lines with comments, tables of all sorts."""

    def key(name: str) -> str:
        is_bare = re.fullmatch(r"[A-Za-z0-9_-]+", name) is not None
        return name if is_bare and draw(st.booleans()) else basic(name)

    def basic(text: str) -> str:
        plain = "".join(f"\\u{ord(char):04x}" if ord(char) < 32 or char in '"\\\x7f' else char for char in text)
        return f'"{plain}"'

    def written(text: str) -> str:
        style = draw(st.integers(0, 3))
        printable = all(ord(char) >= 32 or char in "\t\n" for char in text)
        if style == 1 and printable and "'" not in text and "\n" not in text:
            return f"'{text}'"
        if style == 2 and printable and "'" not in text:
            return f"'''\n{text}'''"
        if style == 3 and printable and "\\" not in text and '"""' not in text and not text.endswith('"'):
            return f'"""\n{text}"""'
        return basic(text)

    def value(told: Any) -> str:
        if isinstance(told, str):
            return written(told)
        if isinstance(told, bool):
            return "true" if told else "false"
        if isinstance(told, list):
            between = draw(st.sampled_from([", ", ",\n  ", ', # ] , " x\n', "\n,"]))
            return f"[{draw(BLANKS)}{between.join(map(value, told))}{draw(st.sampled_from(['', chr(10), ' ']))}]"
        if isinstance(told, dict):
            return "{" + ", ".join(f"{key(name)} = {value(inner)}" for name, inner in told.items()) + "}"
        return repr(told)

    lines = []

    def pairs(prefix: str) -> None:
        for name, told in draw(st.dictionaries(KEYS, VALUES, max_size=3)).items():
            lines.append(f"{draw(BLANKS)}{key(prefix + name)}{draw(BLANKS)}={draw(BLANKS)}{value(told)}")
            if draw(st.booleans()):
                lines.append("# [comment] = '\"")

    pairs("p")
    for number in range(draw(st.integers(0, 3))):
        name = key(f"t{number}.x" if draw(st.booleans()) else f"t{number}")
        if draw(st.booleans()):
            lines.append(f"[{draw(BLANKS)}{name}{draw(BLANKS)}]")
            pairs("p")
        else:
            for _ in range(draw(st.integers(1, 3))):
                lines.append(f"[[{name}]] # x")
                pairs("p")
                if draw(st.booleans()):
                    lines.append(f"[{name}.sub]")
                    pairs("p")
    return "\n".join(lines) + draw(st.sampled_from(["", "\n"]))


@given(documents())
def test_every_key_of_any_valid_text_has_a_place_where_its_name_begins(text: str) -> None:
    told = tomllib.loads(text)
    found = places(text)
    assert {path for path, _ in walk(told)} == found.keys()
    lines = text.split("\n")
    for path, inner in walk(told):
        line, column = found[path]
        rest = lines[line - 1][column - 1 :]
        if isinstance(path[-1], int) and isinstance(inner, str):
            assert rest[0] in "\"'"
        elif isinstance(path[-1], int) and isinstance(inner, list):
            assert rest[0] == "["
        else:
            assert rest[0] not in " \t#=,]}"
