"""What is wrong with a configuration is told with its place, without secrets, and all at once."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import DatawaySettings, mask, mask_url
from gateway.config_files import describe
from gateway.config_values import BadValue, addresses, boolean, size, span
from gateway.model import ConfigError
from tests.config.told import URL, errors, loaded, put

PLACES = [
    (case["file"], case["text"], case["error"])
    for case in tomllib.loads((Path(__file__).parent / "errors.toml").read_text())["case"]
]


@pytest.mark.parametrize(("name", "text", "wanted"), PLACES, ids=range(len(PLACES)))
def test_an_error_names_file_line_and_column_and_what_to_do(conf: Path, name: str, text: str, wanted: str) -> None:
    put(conf, name, text)
    found = errors(conf)
    assert found[0].startswith(f"{name}:{wanted}"), found
    with pytest.raises(ConfigError) as caught:
        loaded(conf)
    assert str(caught.value).splitlines() == [f"{conf}/{error}" for error in found]


def test_an_address_taken_by_a_default_is_told_at_the_setting_that_takes_it(conf: Path) -> None:
    put(conf, "locum.toml", '[receive]\ngrpc = ["127.0.0.1:4318"]\n')
    assert errors(conf) == [
        "locum.toml:2:1: receive.http: 127.0.0.1:4318 is taken by receive.grpc; choose another port"
    ]


def test_all_errors_are_told_at_once(conf: Path) -> None:
    put(conf, "locum.toml", '[receive]\nmax_series = 0\ngrpc = ["x"]\n[nonsense]\n')
    assert [error.split(": ")[0] for error in errors(conf)] == ["locum.toml:2:1", "locum.toml:3:9", "locum.toml:4:1"]


def test_a_directory_or_file_that_cannot_be_read_is_one_clear_line(conf: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory; make it, or name another with --conf"):
        loaded(conf / "none")
    (conf / "locum.toml").write_bytes(b"a = 1\nb = '\xff'\n")
    (found,) = errors(conf)
    assert found == "locum.toml:2:6: not UTF-8; save the file in this encoding"


def test_a_file_of_another_system_with_its_line_ends_and_mark_is_read(conf: Path) -> None:
    (conf / "locum.toml").write_bytes(b"\xef\xbb\xbf[points]\r\nhostname = 'h'\r\nparity = 'x'\r\n")
    assert errors(conf)[0].startswith("locum.toml:3:1: points.parity")


@pytest.mark.parametrize("depth", [10, 100, 200, 300, 400, 500, 1000])
def test_deep_nesting_is_an_error_and_never_a_crash(conf: Path, depth: int) -> None:
    put(conf, "locum.toml", "a = " + "[" * depth + "]" * depth)
    assert len(errors(conf)) == 1


@pytest.mark.parametrize("text", ["a = " + "[" * 5000, "a = " + "[" * 5000 + "]" * 5000, "x" * (5 << 20)])
def test_a_file_made_to_hurt_is_refused(conf: Path, text: str) -> None:
    put(conf, "locum.toml", text)
    assert len(errors(conf)) == 1


@pytest.mark.parametrize("listener", ["grpc", "http", "api"])
@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "10.1.2.3:1", ":1", "gpu-01:1"])
def test_off_loopback_a_listener_needs_a_guard(conf: Path, listener: str, address: str) -> None:
    put(conf, "locum.toml", f'[receive]\n{listener} = ["{address}"]\n')
    (found,) = errors(conf)
    assert found.startswith(f"locum.toml:2:1: receive.{listener}: ") and "allow_insecure = true" in found
    put(conf, "cert.pem", "")
    for guard in ('token = "t"', "allow_insecure = true", 'tls_cert = "cert.pem"\ntls_key = "cert.pem"'):
        put(conf, "locum.toml", f'[receive]\n{listener} = ["{address}"]\n{guard}\n')
        assert errors(conf) == []


def test_a_certificate_without_its_key_is_an_error(conf: Path) -> None:
    put(conf, "cert.pem", "")
    put(conf, "locum.toml", '[receive]\ntls_cert = "cert.pem"\n')
    assert errors(conf) == ["locum.toml:2:1: receive.tls_cert and receive.tls_key go together; set both"]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1"])
def test_loopback_needs_no_guard(conf: Path, address: str) -> None:
    put(conf, "locum.toml", f'[receive]\ngrpc = ["{address}"]\n')
    assert errors(conf) == []


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (URL, "https://openway.guance.com?token=tkn_0****bcdef"),
        ("https://user:pw@host:1/x?token=short&a=#f", "https://host:1/x?token=****&a=****"),
        ("https://[::1", "****"),
        ("tkn_0123456789abcdef0123456789abcdef", "****"),
        ("http://host", "http://host"),
    ],
)
def test_an_address_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert mask_url(url) == shown
    assert DatawaySettings(url=url).masked_url == shown


@given(st.text(max_size=80))
def test_a_mask_shows_ten_characters_at_most_and_never_most_of_a_secret(secret: str) -> None:
    shown = mask(secret)
    assert shown == "****" or (shown == f"{secret[:5]}****{secret[-5:]}" and len(secret) > 15)


SECRET = "d0-n0t-sh0w-th1s-t0-anyb0dy"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("datakit.conf", f'[dataway]\nurls = ["htps://x?token={SECRET}"]\n'),
        ("datakit.conf", f'[dataway]\nurls = [["{SECRET}"]]\n'),
        ("datakit.conf", f'[dataway]\nurls = ["https://[x?token={SECRET}"]\n'),
        ("datakit.conf", f'[dataway]\nurls = "https://x?token={SECRET}"\n'),
        ("datakit.conf", f'[dataway]\nhttp_proxy = "user:{SECRET}@proxy"\n'),
        ("locum.toml", f'[receive]\ntoken = ["{SECRET}"]\n'),
        ("locum.toml", f'[receive]\ntoken = "{SECRET}\\n"\n'),
        ("locum.toml", f'[dataway]\nurls = ["https://x?token={SECRET}\\n\\u0001"]\n'),
        ("locum.toml", f'[receive]\ntoken = "{SECRET}\n'),
        ("locum.toml", f'[dataway]\nurls = ["https://x:port?token={SECRET}"]\n'),
    ],
    ids=range(10),
)
def test_no_error_repeats_a_secret(conf: Path, name: str, text: str) -> None:
    put(conf, name, text)
    found = errors(conf)
    assert found and SECRET not in "\n".join(found)


@pytest.mark.parametrize("name", ["ENV_DATAWAY", "ENV_DATAWAY_HTTP_PROXY", "LOCUM_DATAWAY_PROXY", "LOCUM_DATAWAY_URLS"])
def test_no_error_about_the_environment_repeats_a_secret(conf: Path, name: str) -> None:
    found = errors(conf, **{name: f"nowhere/{SECRET}"})
    assert found and SECRET not in "\n".join(found)


def test_settings_and_their_description_do_not_show_secrets(conf: Path) -> None:
    put(conf, "locum.toml", f'[receive]\ntoken = "{SECRET}"\n[dataway]\nproxy = "http://u:{SECRET}@proxy:1"\n')
    environ = {"ENV_DATAWAY": f"https://h?token={SECRET}"}
    assert SECRET not in repr(loaded(conf, **environ))
    rows = describe(conf, conf.parent, environ)
    assert SECRET not in repr(rows)
    assert ("receive", "token", "****", f"{conf}/locum.toml:2:1") in rows
    assert ("dataway", "proxy", "http://proxy:1", f"{conf}/locum.toml:4:1") in rows
    assert ("dataway", "url", "https://h?token=d0-n0****yb0dy", "environment ENV_DATAWAY") in rows


def test_the_description_says_where_each_value_comes_from(conf: Path) -> None:
    put(conf, "opentelemetry.conf", "[[inputs.opentelemetry]]\nlog_max = 7\n")
    put(conf, "locum.toml", '[[sinks.file]]\npath = "/lines"\n[buffer]\nmax_age_s = "36h"\n')
    rows = describe(conf, conf.parent, {"ENV_HOSTNAME": "me", "ENV_GLOBAL_HOST_TAGS": "a=b"})
    assert ("traces", "log_max_kib", "7", f"{conf}/opentelemetry.conf:2:1") in rows
    assert ("points", "hostname", "me", "environment ENV_HOSTNAME") in rows
    assert ("points.global_tags", "a", "b", "environment ENV_GLOBAL_HOST_TAGS") in rows
    assert ("buffer", "max_age_s", "36h", f"{conf}/locum.toml:4:1") in rows
    assert ("buffer", "segment_bytes", "256MiB", "default") in rows
    assert ("sinks.file", "path", "/lines", f"{conf}/locum.toml:2:1") in rows
    assert ("sinks.file", "rotate_bytes", "64MiB", "default") in rows


@pytest.mark.parametrize(
    ("told", "seconds"),
    [("30s", 30.0), ("1m30s", 90.0), ("1h", 3600.0), ("500ms", 0.5), ("2d", 172800.0), ("1.5h", 5400.0), ("15", 15.0),
     (0.25, 0.25), (3, 3.0), ("100us", 0.0001)],
)  # fmt: skip
def test_a_time_is_read(told: object, seconds: float) -> None:
    assert span(told) == pytest.approx(seconds)


@pytest.mark.parametrize("told", ["", "s", "1x", "-1s", "1s2", "1 s m", "1e3s", True, None, float("inf"), "1" * 100])
def test_what_is_no_time_is_refused(told: object) -> None:
    with pytest.raises(BadValue):
        span(told)


@pytest.mark.parametrize(
    ("told", "count"),
    [("256MB", 256_000_000), ("1GiB", 1 << 30), ("64 kib", 65536), ("10", 10), (10, 10), ("1.5KB", 1500), ("0", 0)],
)
def test_a_size_is_read(told: object, count: int) -> None:
    assert size(told) == count


@pytest.mark.parametrize("told", ["", "MB", "1XB", "-1", "1e9", 1.5, True, None, "9" * 30])
def test_what_is_no_size_is_refused(told: object) -> None:
    with pytest.raises(BadValue):
        size(told)


@pytest.mark.parametrize("told", ["", "maybe", 1, 0, None, "truee"])
def test_what_is_neither_true_nor_false_is_refused(told: object) -> None:
    with pytest.raises(BadValue):
        boolean(told)


@pytest.mark.parametrize(
    "told", ["", "host", "host:", ":", "host:-1", "host:65536", "::1:4317", "[::1]", "http://h:1", "h h:1", "h:１", 5]
)
def test_what_is_no_address_is_refused(told: object) -> None:
    with pytest.raises(BadValue):
        addresses(told)


def test_the_range_of_a_size_is_told_as_one_would_write_it(conf: Path) -> None:
    assert "at least 1MiB" in errors(conf, LOCUM_BUFFER_SEGMENT_BYTES="5")[0]
    assert "at most 1h" in errors(conf, LOCUM_RECEIVE_READ_TIMEOUT_S="2h")[0]
