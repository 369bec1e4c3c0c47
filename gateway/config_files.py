"""Reads the settings: DataKit's files as they are, ``locum.toml`` for the rest, the environment over both.

Order, the later wins: defaults, ``datakit.conf``, ``opentelemetry.conf``, ``locum.toml``, DataKit's environment names,
``LOCUM_SECTION_KEY``. Each file is optional. What is wrong begins with ``file:line:column`` (or the environment's
name) and says what to do. Keys that do not exist are an error in ``locum.toml`` (a slip of the pen) and a note in
DataKit's files (which may well use what Locum has no use for).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from gateway.config import DatawaySettings, FileSettings, PolicySettings, Settings
from gateway.config_agreement import check_buffer, check_proxy, check_receive, check_traces, is_dataway
from gateway.config_datakit import read_datakit, read_opentelemetry
from gateway.config_draft import SECRETS, SECTIONS, Draft, Finding, Origin, Source, environment_name, read, settable
from gateway.config_environment import read_environment
from gateway.config_values import nearest, placeholder, shown
from gateway.model import ConfigError

_LONGEST_SECRET = 64 << 10

Reader = Callable[[Draft, Source, Mapping[str, Any]], None]


def load(conf_dir: Path, data_dir: Path, environ: Mapping[str, str]) -> Settings:
    """The settings of a directory of configuration. Raises ``ConfigError`` with every error found, a line each."""
    settings, _ = _load(conf_dir, data_dir, environ)
    return settings


def load_policy(path: Path) -> PolicySettings:
    """The whitelist in a file of the form of ``opentelemetry.conf``. Raises ``ConfigError`` with file and line."""
    draft = Draft()
    try:
        read_opentelemetry(draft, *read(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    settings = _settle(draft, path.parent, path.parent)
    errors = [str(finding) for finding in draft.findings if finding.level == "error"]
    if errors:
        raise ConfigError("\n".join(errors))
    return settings.policy


def check(conf_dir: Path, data_dir: Path, environ: Mapping[str, str]) -> list[Finding]:
    """Everything there is to say about a directory of configuration; it can be run with if no finding is an error."""
    try:
        draft = _read_all(conf_dir, environ)
    except ConfigError as error:
        place, _, text = str(error).partition(": ")
        return [Finding("error", place, text)]
    _settle(draft, conf_dir, data_dir)
    return draft.findings


def describe(conf_dir: Path, data_dir: Path, environ: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """Every setting as (section, key, value, where it came from); secrets are masked. Raises ``ConfigError``."""
    settings, draft = _load(conf_dir, data_dir, environ)
    parts: dict[str, Any] = {
        "receive": settings.receive,
        "points": settings.points,
        "traces": settings.traces,
        "policy": settings.policy,
        "buffer": settings.buffer,
    }
    rows = [
        (section, item.name, _shown(section, item.name, getattr(part, item.name)), draft.where(section, item.name))
        for section, part in parts.items()
        for item in fields(part)
        if (section, item.name) not in (("points", "global_tags"), ("points", "version"))
    ]
    rows += [("points.global_tags", key, value, _tag_origin(draft, key)) for key, value in settings.points.global_tags]
    for number, dataway in enumerate(settings.dataways):
        section = "dataway" if number == 0 else f"dataway {number + 1}"
        rows.append((section, "url", dataway.masked_url, str(draft.urls[number][1])))
        rows += [
            (
                section,
                item.name,
                _shown("dataway", item.name, getattr(dataway, item.name)),
                draft.where("dataway", item.name),
            )
            for item in fields(dataway)
            if item.name != "url"
        ]
    for file, (_, origins) in zip(settings.files, draft.files, strict=True):
        rows += [
            (
                "sinks.file",
                item.name,
                _shown("sinks.file", item.name, getattr(file, item.name)),
                str(origins.get(item.name, "default")),
            )
            for item in fields(file)
        ]
    return rows


def _shown(section: str, key: str, value: Any) -> str:
    return shown(key, value, (section, key) in SECRETS)


def _tag_origin(draft: Draft, key: str) -> str:
    return str(draft.global_tags[key][1]) if key in draft.global_tags else "the host's name"


def _load(conf_dir: Path, data_dir: Path, environ: Mapping[str, str]) -> tuple[Settings, Draft]:
    draft = _read_all(conf_dir, environ)
    settings = _settle(draft, conf_dir, data_dir)
    errors = [str(finding) for finding in draft.findings if finding.level == "error"]
    if errors:
        raise ConfigError("\n".join(errors))
    return settings, draft


def _read_all(conf_dir: Path, environ: Mapping[str, str]) -> Draft:
    """What all sources say. Raises ``ConfigError`` for a file that is no TOML."""
    if not conf_dir.is_dir():
        raise ConfigError(f"{conf_dir}: no such directory; make it, or name another with --conf")
    draft = Draft()

    def read_locum(draft: Draft, source: Source, told: Mapping[str, Any]) -> None:
        _read_locum(draft, source, told, conf_dir)

    readers: dict[str, Reader] = {
        "datakit.conf": read_datakit,
        "opentelemetry.conf": read_opentelemetry,
        "locum.toml": read_locum,
    }
    for name, reader in readers.items():
        path = _find(draft, conf_dir, name)
        if path is not None:
            source, told = read(path)
            reader(draft, source, told)
    read_environment(draft, environ)
    _read_own_environment(draft, environ, conf_dir)
    return draft


def _find(draft: Draft, conf_dir: Path, name: str) -> Path | None:
    """A file by its name: in the directory, in ``conf.d``, or where DataKit's installer puts it."""
    folder = name.partition(".")[0]
    found = [path for path in (conf_dir / name, conf_dir / "conf.d" / name, conf_dir / "conf.d" / folder / name)
             if path.is_file()]  # fmt: skip
    for path in found[1:]:
        draft.note(str(path), f"it is not read, as {found[0]} is there; take one of the two away")
    return found[0] if found else None


def _read_locum(draft: Draft, source: Source, told: Mapping[str, Any], conf_dir: Path) -> None:
    """``locum.toml``: what DataKit has no word for, or another value for what it has."""
    for section, table in told.items():
        if section == "sinks":
            _read_sinks(draft, source, table)
        elif section not in SECTIONS:
            draft.error(source.at(section), f"[{section}] is not known; {nearest(section, [*SECTIONS, 'sinks'])}")
        elif not isinstance(table, dict):
            draft.error(source.at(section), f"{section}: this has to be a table; write [{section}]")
        else:
            for key, value in table.items():
                _put_own(draft, section, key, value, source.at(section, key), conf_dir)


def _put_own(draft: Draft, section: str, key: str, value: Any, origin: Origin, conf_dir: Path) -> None:
    """One key of ``locum.toml``, or its twin in the environment."""
    if key not in settable(section):
        draft.error(origin, f"{section}.{key} is not known; {nearest(key, settable(section))}")
    elif key == "urls":
        _put_urls(draft, value.split(",") if isinstance(value, str) else value, origin)
    elif key in ("token_file", "url_file"):
        secret = _secret(draft, section, key, value, origin, conf_dir)
        if secret and key == "token_file":
            draft.put("receive", "token", secret, origin)
        elif secret:
            _put_urls(draft, secret.split(), origin)
    elif key in ("tls_cert", "tls_key"):
        path = draft.convert(section, key, value, origin)
        if path is not None and not (conf_dir / path).is_file():
            draft.error(origin, f"{section}.{key}: there is no file {conf_dir / path}")
        elif path is not None:
            draft.put(section, key, str(conf_dir / path), origin)
    else:
        draft.put(section, key, value, origin)


def _put_urls(draft: Draft, told: Any, origin: Origin) -> None:
    """The Dataways' addresses, instead of those that DataKit's files have."""
    if not isinstance(told, list):
        draft.error(origin, 'dataway.urls: write a list, as ["https://openway.guance.com?token=…"]')
        return
    found = [
        (draft.convert("dataway", "urls", url, origin.at(index)), origin.at(index)) for index, url in enumerate(told)
    ]
    draft.urls = [(url.strip(), place) for url, place in found if url and url.strip()]


def _secret(draft: Draft, section: str, key: str, value: Any, origin: Origin, conf_dir: Path) -> str | None:
    """What a secret's file holds, without the line's end; its path starts at the configuration's directory."""
    name: str | None = draft.convert(section, key, value, origin)
    if name is None:
        return None
    path = conf_dir / name
    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST_SECRET).decode("utf-8").strip()
    except OSError as error:
        draft.error(origin, f"{section}.{key}: {path} cannot be read ({error.strerror})")
        return None
    except UnicodeDecodeError:
        draft.error(origin, f"{section}.{key}: {path} is no text in UTF-8")
        return None
    if not content:
        draft.error(origin, f"{section}.{key}: {path} is empty; write the secret into it")
    return content


def _read_sinks(draft: Draft, source: Source, sinks: Any) -> None:
    """``[[sinks.file]]``: each a sink."""
    if not isinstance(sinks, dict):
        draft.error(source.at("sinks"), "sinks: this has to be a table; write [[sinks.file]]")
        return
    for name in sinks:
        if name != "file":
            draft.error(source.at("sinks", name), f"sinks.{name} is not known; {nearest(name, ['file'])}")
    entries = sinks.get("file", [])
    many = isinstance(entries, list)
    for index, entry in enumerate(entries if many else [entries]):
        _put_file(draft, entry, source.at("sinks", "file", *([index] if many else [])))


def _put_file(draft: Draft, entry: Any, origin: Origin) -> None:
    if not isinstance(entry, dict) or not entry.get("path"):
        draft.error(origin, 'sinks.file: name a directory with path = "…"')
        return
    values, origins = {}, {}
    for key, value in entry.items():
        place = origin.at(key)
        if key not in settable("sinks.file"):
            draft.error(place, f"sinks.file.{key} is not known; {nearest(key, settable('sinks.file'))}")
            continue
        found = draft.convert("sinks.file", key, value, place)
        if found is not None:
            values[key], origins[key] = found, place
    if "path" in values:
        draft.files.append((FileSettings(**values), origins))


def _read_own_environment(draft: Draft, environ: Mapping[str, str], conf_dir: Path) -> None:
    """``LOCUM_SECTION_KEY``. An empty value is none."""
    known = {environment_name(section, key): (section, key) for section in SECTIONS for key in settable(section)}
    file: dict[str, str] = {}
    for name, (section, key) in known.items():
        if not environ.get(name):
            continue
        if section == "sinks.file":
            file[key] = environ[name]
        else:
            _put_own(draft, section, key, environ[name], Source(f"environment {name}").at(), conf_dir)
    if file:
        draft.files = []
        _put_file(draft, file, Source(f"environment {environment_name('sinks.file', 'path')}").at())
    prefixes = tuple(environment_name(section, "") for section in SECTIONS)
    for name in sorted(environ.keys() - known.keys()):
        if name.startswith(prefixes) and environ[name]:
            draft.note(f"environment {name}", f"it has no effect; {nearest(name, known)}")


def _settle(draft: Draft, conf_dir: Path, data_dir: Path) -> Settings:
    """Settings out of a draft; errors in what does not go together are added to it."""
    built = {section: kind(**_of(draft, section)) for section, kind in SECTIONS.items() if _is_whole(section)}
    hostname = built["points"].hostname or socket.gethostname()
    points = replace(built["points"], hostname=hostname, global_tags=_global_tags(draft, hostname))
    check_receive(draft, built["receive"])
    check_buffer(draft, built["buffer"])
    check_traces(draft, built["traces"])
    dataways = tuple(
        DatawaySettings(url=url, **_of(draft, "dataway"))
        for url, origin in draft.urls
        if is_dataway(draft, url, origin)
    )
    check_proxy(draft)
    files = tuple(replace(file, path=data_dir / file.path) for file, _ in draft.files)
    if len({file.path for file in files}) < len(files):
        draft.error(draft.files[-1][1]["path"], "sinks.file: two of them write to one directory; give each its own")
    notes = tuple(str(finding) for finding in draft.findings if finding.level == "note")
    return Settings(
        conf_dir,
        data_dir,
        built["receive"],
        points,
        built["traces"],
        built["policy"],
        built["buffer"],
        dataways,
        files,
        notes,
    )


def _is_whole(section: str) -> bool:
    """Whether a section is one value of Settings, not several."""
    return section not in ("dataway", "sinks.file")


def _of(draft: Draft, section: str) -> dict[str, Any]:
    return {key: value for (part, key), value in draft.values.items() if part == section}


def _global_tags(draft: Draft, hostname: str) -> tuple[tuple[str, str], ...]:
    """Global tags with DataKit's placeholders filled in; ``host`` is always there, as in DataKit."""
    known = {"datakit_hostname": hostname}
    if any("datakit_ip" in value for value, _ in draft.global_tags.values()):
        known |= {"datakit_ip": address} if (address := _own_address()) else {}
    found = {}
    for key, (value, origin) in draft.global_tags.items():
        filled = placeholder(value, known)
        if filled is None:
            draft.note(origin, f"global tag {key} is left out: there is no {value} here")
        elif key:
            found[key] = filled
    return tuple({"host": hostname, **found}.items())


def _own_address() -> str | None:
    """The address from which this host would talk to others; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address that is nobody's (RFC 5737)
        except OSError:
            return None
        return str(probe.getsockname()[0])
