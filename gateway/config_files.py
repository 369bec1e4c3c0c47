"""Reads the settings: DataKit's files as they are, ``locum.toml`` for the rest, the environment over both.

Order, the later wins: defaults, ``datakit.conf``, ``opentelemetry.conf``, ``locum.toml``, DataKit's environment names,
``LOCUM_SECTION_KEY``. What is wrong is a ``ConfigError`` that begins with ``file:line:column`` and says what to do.
Keys that Locum has no use for are an error in ``locum.toml`` (a slip of the pen) and a note in DataKit's files.
"""

from __future__ import annotations

import difflib
import json
import re
import socket
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from gateway.config import (
    Address,
    BufferSettings,
    DatawaySettings,
    FileSettings,
    PointSettings,
    PolicySettings,
    ReceiveSettings,
    Settings,
    TraceSettings,
)
from gateway.model import ConfigError
from gateway.policy.rules import compile_pattern

SECTIONS: dict[str, type] = {
    "receive": ReceiveSettings,
    "points": PointSettings,
    "traces": TraceSettings,
    "policy": PolicySettings,
    "buffer": BufferSettings,
    "dataway": DatawaySettings,
}
"""The tables of ``locum.toml``. ``[dataway]`` holds for every Dataway; ``[[sinks.file]]`` is a FileSettings each."""

UNSETTABLE = {("points", "version"), ("dataway", "url"), ("points", "global_tags")}
"""Fields that come from elsewhere: the package, ``urls`` of datakit.conf, ``[global_host_tags]``."""

SECRETS = {("receive", "token"), ("dataway", "proxy")}

_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}  # fmt: skip
_SPANS = {"": 1.0, "MS": 0.001, "S": 1.0, "M": 60.0, "H": 3600.0, "D": 86400.0}


@dataclass(frozen=True, slots=True)
class Source:
    """A file that was read: its text, to find the place of what is wrong in it."""

    path: Path
    text: str = ""

    def place(self, keys: tuple[str, ...], element: str | None = None) -> str:
        """``file:line:column`` of a key (tables, then the key), or of a text in its value."""
        line, column = locate(self.text, keys, element)
        return f"{self.path}:{line}:{column}"


@dataclass(slots=True)
class _Reading:
    """Values as they come together: by section and key, each with where it came from."""

    values: dict[tuple[str, str], Any] = field(default_factory=dict)
    origins: dict[tuple[str, str], str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    files: list[FileSettings] = field(default_factory=list)
    global_tags: dict[str, str] = field(default_factory=dict)

    def put(self, section: str, key: str, value: Any, origin: str) -> None:
        """Take a value in, if it can be what the setting wants; else remember what is wrong."""
        try:
            self.values[section, key] = convert(_hint(section, key), key, value)
        except ValueError as error:
            self.errors.append(f"{origin}: {section}.{key}: {error}")
            return
        self.origins[section, key] = origin


def load(conf_dir: Path, data_dir: Path, environ: Mapping[str, str]) -> Settings:
    """The settings of a directory of configuration. Raises ``ConfigError`` with every error found, a line each."""
    return _load(conf_dir, data_dir, environ)[0]


def describe(conf_dir: Path, data_dir: Path, environ: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """Every setting as (section, key, value, where it came from); secrets are masked. Raises ``ConfigError``."""
    settings, reading = _load(conf_dir, data_dir, environ)
    parts: dict[str, Any] = {
        "receive": settings.receive, "points": settings.points, "traces": settings.traces,
        "policy": settings.policy, "buffer": settings.buffer,
    }  # fmt: skip
    rows = [
        (section, item.name, _shown(section, item.name, getattr(part, item.name)),
         reading.origins.get((section, item.name), "default"))
        for section, part in parts.items()
        for item in fields(part)
    ]  # fmt: skip
    for number, dataway in enumerate(settings.dataways, 1):
        rows.append(
            (f"dataway {number}", "url", dataway.masked_url, reading.origins.get(("dataway", "url"), "default"))
        )
        rows += [
            (f"dataway {number}", item.name, _shown("dataway", item.name, getattr(dataway, item.name)),
             reading.origins.get(("dataway", item.name), "default"))
            for item in fields(dataway)
            if item.name != "url"
        ]  # fmt: skip
    rows += [("sinks.file", "path", str(file.path), "locum.toml") for file in settings.files]
    return rows


def _load(conf_dir: Path, data_dir: Path, environ: Mapping[str, str]) -> tuple[Settings, _Reading]:
    if not conf_dir.is_dir():
        raise ConfigError(f"{conf_dir}: no such directory; make it, or name another with --conf")
    reading = _Reading()
    for name, read in (("datakit.conf", _datakit), ("opentelemetry.conf", _opentelemetry), ("locum.toml", _locum)):
        path = _find(conf_dir, name)
        if path is not None:
            source, told = _parse(path)
            read(reading, source, told)
    _environment(reading, environ)
    settings = _settle(reading, conf_dir, data_dir)
    if reading.errors:
        raise ConfigError("\n".join(reading.errors))
    return settings, reading


def _find(conf_dir: Path, name: str) -> Path | None:
    stem = name.removesuffix(".conf")
    for path in (conf_dir / name, conf_dir / "conf.d" / name, conf_dir / "conf.d" / stem / name):
        if path.is_file():
            return path
    return None


def _parse(path: Path) -> tuple[Source, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        return Source(path, text), tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        place = f"{path}:{found[1]}:{found[2]}" if found else f"{path}:{max(1, text.count(chr(10)))}:1"
        raise ConfigError(f"{place}: {str(error).partition(' (at ')[0]}; it is no valid TOML") from None


def locate(text: str, keys: tuple[str, ...], element: str | None = None) -> tuple[int, int]:
    """Line and column, from 1, of a key under its tables, or of ``element`` in its value. (1, 1) if it is not there."""
    tables, wanted = keys[:-1], keys[-1]
    inside: tuple[str, ...] = ()
    lines = text.splitlines()
    for at, line in enumerate(lines):
        header = re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]\]?\s*(#.*)?$", line)
        if header:
            inside = tuple(part.strip(" \"'") for part in header[1].split("."))
            if inside == keys:
                return at + 1, line.index("[") + 1
            continue
        found = re.match(rf"\s*(?P<key>[\"']?{re.escape(wanted)}[\"']?)\s*=", line)
        if found and inside == tables:
            if element is None:
                return at + 1, found.start("key") + 1
            written = {json.dumps(element, ensure_ascii=False)[1:-1], element}
            for below in range(at, len(lines)):
                for form in written:
                    column = lines[below].find(form)
                    if column >= 0:
                        return below + 1, column + 1
    return 1, 1


def _datakit(reading: _Reading, source: Source, told: dict[str, Any]) -> None:
    """``datakit.conf``: the Dataway, the API's address, the host's name and the global tags."""
    put = reading.put
    dataway = told.get("dataway", {})
    names = {"max_raw_body_size": "max_body_bytes", "timeout_v2": "timeout_s", "timeout": "timeout_s", "gzip": "gzip",
             "http_proxy": "proxy", "insecure_skip_verify": "tls_insecure", "tls_insecure": "tls_insecure"}  # fmt: skip
    if "urls" in dataway:
        place = source.place(("dataway", "urls"))
        reading.urls = [str(url) for url in dataway["urls"] if url]
        reading.origins["dataway", "url"] = place
    for name, key in names.items():
        if dataway.get(name) not in (None, ""):
            put("dataway", key, dataway[name], source.place(("dataway", name)))
    if "content_encoding" in dataway:
        put(
            "dataway", "encoding", _encoding(dataway["content_encoding"]), source.place(("dataway", "content_encoding"))
        )
    listen = told.get("http_api", {}).get("listen")
    if listen:
        put("receive", "api", _both_loopbacks(listen), source.place(("http_api", "listen")))
    if told.get("hostname"):
        put("points", "hostname", told["hostname"], source.place(("hostname",)))
    for key, value in told.get("global_host_tags", {}).items():
        reading.global_tags[key] = str(value)
    known = {
        "dataway": {*names, "urls", "content_encoding"},
        "http_api": {"listen"},
        "hostname": None,
        "global_host_tags": None,
    }
    _note_unused(reading, source, told, known)


def _opentelemetry(reading: _Reading, source: Source, told: dict[str, Any]) -> None:
    """``opentelemetry.conf``: ``[[inputs.opentelemetry]]``, of which one counts."""
    inputs = told.get("inputs", {}).get("opentelemetry", told.get("opentelemetry", {}))
    if isinstance(inputs, list):
        if len(inputs) > 1:
            reading.notes.append(f"{source.path}: {len(inputs)} inputs.opentelemetry; the first counts")
        inputs = inputs[0] if inputs else {}
    tables = ("inputs", "opentelemetry")

    def put(section: str, key: str, value: Any, *names: str) -> None:
        reading.put(section, key, value, source.place((*tables, *names)))

    for name in ("customer_tags_all", "costomer_tags_all"):
        if name in inputs:
            put("policy", "customer_tags_all", inputs[name], name)
    if "customer_tags" in inputs:
        put("policy", "customer_tags", inputs["customer_tags"], "customer_tags")
        _check_patterns(reading, source, (*tables, "customer_tags"), inputs["customer_tags"])
    traces = {
        "split_service_name": "split_service_name", "spilt_service_name": "split_service_name",
        "clean_message": "clean_message", "del_message": "del_message", "jmarshaler": "json_marshaler",
        "compatible_ddtrace": "compatible_ddtrace", "compatible_zhaoshang": "compatible_zhaoshang",
        "keep_rare_resource": "keep_rare_resource", "tracing_metric_enable": "tracing_metrics",
        "log_max": "log_max_kib",
    }  # fmt: skip
    for name, key in traces.items():
        if name in inputs:
            put("traces", key, inputs[name], name)
    for name in ("tags", "close_resource"):
        if name in inputs:
            put("traces", name, inputs[name], name)
    if "sampling_rate" in inputs.get("sampler", {}):
        put("traces", "sampling_rate", inputs["sampler"]["sampling_rate"], "sampler", "sampling_rate")
    http = inputs.get("http", {})
    for name, key in (("trace_api", "trace_path"), ("metric_api", "metric_path"), ("logs_api", "log_path")):
        if http.get(name):
            put("receive", key, http[name], "http", name)
    grpc = inputs.get("grpc", {})
    if grpc.get("addr"):
        put("receive", "grpc", _both_loopbacks(grpc["addr"]), "grpc", "addr")
    if grpc.get("max_payload", 0) > 0:
        put("receive", "max_grpc_request_bytes", grpc["max_payload"], "grpc", "max_payload")
    known = {
        *traces,
        "customer_tags",
        "customer_tags_all",
        "costomer_tags_all",
        "tags",
        "close_resource",
        "sampler",
        "http",
        "grpc",
    }
    for name in sorted(inputs.keys() - known):
        reading.notes.append(f"{source.place((*tables, name))}: {name} has no use here and is passed over")


def _locum(reading: _Reading, source: Source, told: dict[str, Any]) -> None:
    """``locum.toml``: what DataKit has no word for."""
    for section, values in told.items():
        if section == "sinks":
            _file_sinks(reading, source, values)
            continue
        if section not in SECTIONS or not isinstance(values, dict):
            reading.errors.append(f"{source.place((section,))}: {section}: {_unknown(section, [*SECTIONS, 'sinks'])}")
            continue
        known = settable(section)
        for key, value in values.items():
            place = source.place((section, key))
            if key == "token_file" and section == "receive":
                _from_file(reading, "receive", "token", Path(str(value)), place)
            elif key == "url_file" and section == "dataway":
                content = _content(reading, Path(str(value)), place)
                if content:
                    reading.urls, reading.origins["dataway", "url"] = content.split(), place
            elif key == "urls" and section == "dataway":
                reading.urls, reading.origins["dataway", "url"] = [str(url) for url in value], place
            elif key not in known:
                reading.errors.append(f"{place}: {section}.{key}: {_unknown(key, known)}")
            else:
                reading.put(section, key, value, place)
                if (section, key) == ("policy", "customer_tags"):
                    _check_patterns(reading, source, (section, key), value)


def _file_sinks(reading: _Reading, source: Source, sinks: Any) -> None:
    files = sinks.get("file", []) if isinstance(sinks, dict) else []
    for name in sinks if isinstance(sinks, dict) else ():
        if name != "file":
            reading.errors.append(f"{source.place(('sinks', name))}: sinks.{name}: {_unknown(name, ['file'])}")
    for entry in files if isinstance(files, list) else [files]:
        place = source.place(("sinks", "file", "path"))
        if not isinstance(entry, dict) or not entry.get("path"):
            reading.errors.append(f'{source.place(("sinks", "file"))}: sinks.file: name a directory with path = "…"')
            continue
        try:
            rotate = convert(int, "rotate_bytes", entry.get("rotate_bytes", FileSettings(Path()).rotate_bytes))
        except ValueError as error:
            reading.errors.append(f"{place}: sinks.file.rotate_bytes: {error}")
            continue
        reading.files.append(FileSettings(Path(str(entry["path"])), rotate))


def _environment(reading: _Reading, environ: Mapping[str, str]) -> None:
    """DataKit's names first, then ``LOCUM_SECTION_KEY``."""
    for name, take in _DATAKIT_ENVIRONMENT.items():
        if environ.get(name):
            try:
                take(reading, environ[name], name)
            except ValueError as error:
                reading.errors.append(f"environment {name}: {error}")
    for section in SECTIONS:
        for key in settable(section):
            name = environment_name(section, key)
            if environ.get(name):
                reading.put(section, key, environ[name], f"environment {name}")
                if (section, key) == ("policy", "customer_tags"):
                    _check_patterns(reading, Source(Path(f"environment {name}")), (key,), reading.values[section, key])
    if environ.get("LOCUM_DATAWAY_URLS"):
        reading.urls = environ["LOCUM_DATAWAY_URLS"].replace(",", " ").split()
        reading.origins["dataway", "url"] = "environment LOCUM_DATAWAY_URLS"


def environment_name(section: str, key: str) -> str:
    """The environment name of a setting of ``locum.toml``."""
    return f"LOCUM_{section}_{key}".upper()


def settable(section: str) -> list[str]:
    """The keys of a section of ``locum.toml``."""
    return [item.name for item in fields(SECTIONS[section]) if (section, item.name) not in UNSETTABLE]


def _sets(
    section: str, key: str, change: Callable[[str], Any] = lambda text: text
) -> Callable[[_Reading, str, str], None]:
    def take(reading: _Reading, text: str, name: str) -> None:
        reading.put(section, key, change(text), f"environment {name}")
        if (section, key) == ("policy", "customer_tags"):
            _check_patterns(
                reading, Source(Path(f"environment {name}")), (key,), reading.values.get((section, key), ())
            )

    return take


def _take_urls(reading: _Reading, text: str, name: str) -> None:
    reading.urls = [url.strip() for url in text.split(",") if url.strip()]
    reading.origins["dataway", "url"] = f"environment {name}"


def _take_global_tags(reading: _Reading, text: str, name: str) -> None:
    for pair in text.split(","):
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"{pair!r}: write k=v,k=v")
        reading.global_tags[key.strip()] = value.strip()


def _take_grpc(reading: _Reading, text: str, name: str) -> None:
    told = _json(text)
    if told.get("addr"):
        reading.put("receive", "grpc", _both_loopbacks(told["addr"]), f"environment {name}")
    if int(told.get("max_payload", 0)) > 0:
        reading.put("receive", "max_grpc_request_bytes", int(told["max_payload"]), f"environment {name}")


def _take_http(reading: _Reading, text: str, name: str) -> None:
    told = _json(text)
    for key, setting in (("trace_api", "trace_path"), ("metric_api", "metric_path"), ("logs_api", "log_path")):
        if told.get(key):
            reading.put("receive", setting, told[key], f"environment {name}")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from None


def _encoding(told: Any) -> str:
    return "protobuf" if str(told).lower() in ("v2", "protobuf") else "line_protocol"


def _both_loopbacks(told: Any) -> list[str]:
    """An address of DataKit's files; loopback means IPv4 and IPv6."""
    host, _, port = str(told).rpartition(":")
    if host in ("127.0.0.1", "localhost"):
        return [f"127.0.0.1:{port}", f"[::1]:{port}"]
    return [str(told)]


_DATAKIT_ENVIRONMENT: dict[str, Callable[[_Reading, str, str], None]] = {
    "ENV_DATAWAY": _take_urls,
    "ENV_DATAWAY_TIMEOUT": _sets("dataway", "timeout_s"),
    "ENV_DATAWAY_CONTENT_ENCODING": _sets("dataway", "encoding", _encoding),
    "ENV_DATAWAY_MAX_RAW_BODY_SIZE": _sets("dataway", "max_body_bytes"),
    "ENV_DATAWAY_DISABLE_GZIP": _sets("dataway", "gzip", lambda text: not convert(bool, "", text)),
    "ENV_DATAWAY_HTTP_PROXY": _sets("dataway", "proxy"),
    "ENV_DATAWAY_TLS_INSECURE": _sets("dataway", "tls_insecure"),
    "ENV_HTTP_LISTEN": _sets("receive", "api", _both_loopbacks),
    "ENV_HOSTNAME": _sets("points", "hostname"),
    "ENV_GLOBAL_TAGS": _take_global_tags,
    "ENV_GLOBAL_HOST_TAGS": _take_global_tags,
    "ENV_INPUT_OTEL_CUSTOMER_TAGS": _sets("policy", "customer_tags", _json),
    "ENV_INPUT_OTEL_CUSTOMER_TAGS_ALL": _sets("policy", "customer_tags_all"),
    "ENV_INPUT_OTEL_GRPC": _take_grpc,
    "ENV_INPUT_OTEL_HTTP": _take_http,
    "ENV_INPUT_OTEL_TAGS": _sets("traces", "tags", _json),
    "ENV_INPUT_OTEL_CLOSE_RESOURCE": _sets("traces", "close_resource", _json),
    "ENV_INPUT_OTEL_SAMPLER": _sets("traces", "sampling_rate"),
    "ENV_INPUT_OTEL_KEEP_RARE_RESOURCE": _sets("traces", "keep_rare_resource"),
    "ENV_INPUT_OTEL_DEL_MESSAGE": _sets("traces", "del_message"),
    "ENV_INPUT_OTEL_COMPATIBLE_DDTRACE": _sets("traces", "compatible_ddtrace"),
    "ENV_INPUT_OTEL_SPLIT_SERVICE_NAME": _sets("traces", "split_service_name"),
    "ENV_INPUT_OTEL_CLEAN_MESSAGE": _sets("traces", "clean_message"),
    "ENV_INPUT_OTEL_TRACING_METRIC_ENABLE": _sets("traces", "tracing_metrics"),
}
"""DataKit's environment names that mean something here."""


def _settle(reading: _Reading, conf_dir: Path, data_dir: Path) -> Settings:
    """Settings out of what was read; what only shows when all is together is checked here."""
    built = {}
    for section, kind in SECTIONS.items():
        if section == "dataway":
            continue
        built[section] = kind(**{key: value for (part, key), value in reading.values.items() if part == section})
    hostname = built["points"].hostname or socket.gethostname()
    tags = {key: _placeholder(value, hostname) for key, value in reading.global_tags.items()}
    tags.setdefault("host", hostname)
    points = replace(built["points"], hostname=hostname, global_tags=tuple(tags.items()))
    _check_exposure(reading, built["receive"])
    common = {key: value for (part, key), value in reading.values.items() if part == "dataway"}
    dataways = []
    for url in reading.urls:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            origin = reading.origins["dataway", "url"]
            reading.errors.append(f"{origin}: dataway: the address of a Dataway begins with https:// or http://")
            continue
        dataways.append(DatawaySettings(url=url, **common))
    return Settings(
        conf_dir, data_dir, built["receive"], points, built["traces"], built["policy"], built["buffer"],
        tuple(dataways), tuple(reading.files), tuple(reading.notes),
    )  # fmt: skip


def _check_exposure(reading: _Reading, receive: ReceiveSettings) -> None:
    """Off loopback only with TLS or a token, or when said aloud."""
    if bool(receive.tls_cert) != bool(receive.tls_key):
        reading.errors.append(
            f"{reading.origins.get(('receive', 'tls_cert'), 'receive')}: tls_cert and tls_key go together"
        )
    if receive.allow_insecure or receive.token or receive.tls_cert:
        return
    for name in ("grpc", "http", "api"):
        for address in getattr(receive, name):
            if not address.is_loopback:
                reading.errors.append(
                    f"{reading.origins.get(('receive', name), 'default')}: receive.{name}: {address} can be reached "
                    "from elsewhere; set receive.tls_cert and tls_key, or receive.token, or allow_insecure = true"
                )


def _check_patterns(reading: _Reading, source: Source, keys: tuple[str, ...], patterns: Any) -> None:
    """Compile each ``reg:`` pattern, so that a bad one is named with its own line."""
    for pattern in patterns if isinstance(patterns, list | tuple) else ():
        if isinstance(pattern, str) and pattern.startswith("reg:"):
            try:
                compile_pattern(pattern.removeprefix("reg:"))
            except ConfigError as error:
                place = source.place(keys, pattern) if source.text else str(source.path)
                reading.errors.append(f"{place}: customer_tags: {error}; correct it or take it out")


def _from_file(reading: _Reading, section: str, key: str, path: Path, place: str) -> None:
    content = _content(reading, path, place)
    if content:
        reading.put(section, key, content, place)


def _content(reading: _Reading, path: Path, place: str) -> str:
    """A secret's file, without the line's end."""
    try:
        content = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reading.errors.append(f"{place}: {path} cannot be read ({type(error).__name__})")
        return ""
    if not content:
        reading.errors.append(f"{place}: {path} is empty")
    return content


def _note_unused(
    reading: _Reading, source: Source, told: Mapping[str, Any], known: Mapping[str, set[str] | None]
) -> None:
    """Note what DataKit knows and Locum has no use for."""
    for name, value in told.items():
        if name not in known:
            reading.notes.append(f"{source.place((name,))}: {name} has no use here and is passed over")
        elif known[name] is not None and isinstance(value, dict):
            for key in sorted(value.keys() - (known[name] or set())):
                reading.notes.append(f"{source.place((name, key))}: {name}.{key} has no use here and is passed over")


def _unknown(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f"no such key; did you mean {near[0]!r}?" if near else "no such key; see docs/configuration.md"


def _placeholder(value: str, hostname: str) -> str:
    """DataKit's placeholders in global tags."""
    return hostname if value in ("__datakit_hostname", "$datakit_hostname") else value


def _hint(section: str, key: str) -> Any:
    return get_type_hints(SECTIONS[section])[key]


def convert(hint: Any, key: str, value: Any) -> Any:
    """``value``, from TOML or from text, as what the setting wants. Raises ``ValueError`` that says how to write it."""
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        inner = next(option for option in options if option is not type(None))
        return convert(inner, key, value)
    if origin is Literal:
        if value not in options:
            raise ValueError(f"{value!r}: choose one of {', '.join(map(repr, options))}")
        return value
    if origin is tuple:
        return _convert_many(options[0], key, value)
    if hint is bool:
        return _bool(value)
    if hint is int:
        return _size(value) if key.endswith("_bytes") else _number(value, int)
    if hint is float:
        return _span(value) if key.endswith("_s") else _number(value, float)
    if hint is Address:
        return _address(value)
    if hint is Path:
        return Path(_text(value))
    return _text(value)


def _convert_many(item: Any, key: str, value: Any) -> tuple[Any, ...]:
    if get_origin(item) is tuple:  # pairs: a table, or its JSON
        told = _json(value) if isinstance(value, str) else value
        if not isinstance(told, dict):
            raise ValueError("write a table of keys and values")
        pair = get_args(item)[1]
        if pair is str:
            return tuple((str(name), str(text)) for name, text in told.items())
        return tuple((str(name), tuple(map(str, texts))) for name, texts in told.items())
    if isinstance(value, str):
        told = _json(value) if value.lstrip().startswith("[") and '"' in value else value.split(",")
        value = [part.strip() for part in told if part.strip()]
    if not isinstance(value, list | tuple):
        raise ValueError("write a list")
    return tuple(convert(item, key, part) for part in value)


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in ("true", "1", "yes", "on", "t", "y"):
        return True
    if text in ("false", "0", "no", "off", "f", "n"):
        return False
    raise ValueError(f"{value!r}: write true or false")


def _number(value: Any, kind: type[int] | type[float]) -> Any:
    try:
        if isinstance(value, bool):
            raise ValueError
        number = kind(value)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r}: write a number") from None
    if number < 0:
        raise ValueError(f"{value!r}: it must not be negative")
    return number


def _scaled(value: Any, units: Mapping[str, float], example: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(_number(value, float))
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    if not found or found[2].upper() not in units:
        raise ValueError(f"{value!r}: write a number with a unit, as {example}")
    return float(found[1]) * units[found[2].upper()]


def _size(value: Any) -> int:
    return int(_scaled(value, _SIZES, '"256MB" or "1GiB"'))


def _span(value: Any) -> float:
    return _scaled(value, _SPANS, '"30s", "500ms" or "1h"')


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r}: write a text in quotes")
    return value


def _address(value: Any) -> Address:
    host, _, port = _text(value).rpartition(":")
    host = host.strip("[]") or "0.0.0.0"
    if not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{value!r}: write HOST:PORT, as 127.0.0.1:4317 or [::1]:4317")
    return Address("127.0.0.1" if host == "localhost" else host, int(port))


def _shown(section: str, key: str, value: Any) -> str:
    """A value for people; secrets are not."""
    if (section, key) in SECRETS and value:
        return "****"
    if isinstance(value, tuple):
        return ", ".join(f"{part[0]}={part[1]}" if isinstance(part, tuple) else str(part) for part in value)
    return "" if value is None else str(value)
