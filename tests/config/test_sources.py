"""The settings: what each source says, and which wins."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gateway.config import Address, Settings
from gateway.config_draft import SECTIONS, environment_name, settable
from gateway.config_environment import ENVIRONMENT
from tests.config.told import URL, errors, loaded, notes, put


def test_an_empty_directory_means_the_defaults(conf: Path) -> None:
    settings = loaded(conf, ENV_HOSTNAME="gpu-01")
    assert settings.receive.grpc == (Address("127.0.0.1", 4317), Address("::1", 4317))
    assert settings.dataways == () and settings.files == ()
    assert settings.points.hostname == "gpu-01"
    assert settings.points.global_tags == (("host", "gpu-01"),)
    assert settings.notes == ()


DATAKIT_CONF = f"""
default_enabled_inputs = ["cpu"]
[http_api]
  listen = "localhost:9999"
  timeout = "30s"
  allowed_cors_origins = []
[dataway]
  urls = ["{URL}",
    "http://10.0.0.1:9528?token=tkn_b"]
  timeout_v2 = "1m30s"
  content_encoding = "V1"
  gzip = false
  max_raw_body_size = 1048576
  http_proxy = "http://user:secret-word@proxy:3128"
  max_retry_count = 1
  [dataway.wal]
    max_capacity_gb = 2.0
[global_host_tags]
  host = "$datakit_hostname"
  team = "ml"
  ip = "__datakit_ip"
  id = "__datakit_id"
[environments]
  ENV_HOSTNAME = "from-file"
"""


def test_datakit_conf_is_read_unchanged(conf: Path) -> None:
    put(conf, "datakit.conf", DATAKIT_CONF)
    settings = loaded(conf)
    assert settings.receive.api == (Address("127.0.0.1", 9999), Address("::1", 9999))
    assert settings.receive.cors_origins == ("*",)
    assert [dataway.url for dataway in settings.dataways] == [URL, "http://10.0.0.1:9528?token=tkn_b"]
    for dataway in settings.dataways:
        assert (dataway.timeout_s, dataway.encoding, dataway.gzip) == (90.0, "line_protocol", False)
        assert (dataway.max_body_bytes, dataway.proxy) == (1 << 20, "http://user:secret-word@proxy:3128")
    tags = dict(settings.points.global_tags)
    assert (tags["host"], tags["team"]) == ("from-file", "ml")
    assert "id" not in tags and "$" not in tags.get("ip", "")


def test_what_datakit_knows_and_locum_does_not_use_is_a_note_at_its_place(conf: Path) -> None:
    put(conf, "datakit.conf", DATAKIT_CONF)
    found = notes(conf)
    assert "datakit.conf:2:1: default_enabled_inputs has no effect here" in found
    assert "datakit.conf:5:3: http_api.timeout has no effect here" in found
    assert "datakit.conf:15:3: dataway.max_retry_count has no effect here; here nothing is given up" in found
    assert "datakit.conf:22:3: global tag id is left out: there is no __datakit_id here" in found


OPENTELEMETRY_CONF = """
[[inputs.opentelemetry]]
  customer_tags = ["team", "reg:^gpu\\\\."]
  costomer_tags_all = false
  spilt_service_name = false
  del_message = true
  jmarshaler = "gojson"
  log_max = 100
  keep_rare_resource = true
  tracing_metric_enable = true
  tracing_metric_tag_blacklist = []
  [inputs.opentelemetry.close_resource]
    shop = ["^/health$"]
    "*" = ["ping", "pong"]
  [inputs.opentelemetry.sampler]
    sampling_rate = 0.5
  [inputs.opentelemetry.tags]
    key1 = "value1"
    number = 5
  [inputs.opentelemetry.expected_headers]
    ex_version = "1.2.3"
  [inputs.opentelemetry.http]
    http_status_ok = 200
    trace_api = "/a"
    metric_api = "/b"
    logs_api = ""
  [inputs.opentelemetry.grpc]
    addr = "127.0.0.1:14317"
    max_payload = 16777216
"""


@pytest.mark.parametrize(
    "name", ["opentelemetry.conf", "conf.d/opentelemetry.conf", "conf.d/opentelemetry/opentelemetry.conf"]
)
@pytest.mark.parametrize("brackets", ["[[inputs.opentelemetry]]", "[inputs.opentelemetry]"])
def test_opentelemetry_conf_is_read_unchanged_wherever_datakit_has_it(conf: Path, name: str, brackets: str) -> None:
    put(conf, name, OPENTELEMETRY_CONF.replace("[[inputs.opentelemetry]]", brackets))
    settings = loaded(conf)
    traces = settings.traces
    assert settings.policy.customer_tags == ("team", r"reg:^gpu\.")
    assert settings.policy.customer_tags_all is False
    assert (traces.split_service_name, traces.del_message, traces.json_marshaler) == (False, True, "gojson")
    assert (traces.log_max_kib, traces.sampling_rate, traces.tracing_metrics) == (100, 0.5, True)
    assert traces.tracing_metric_tag_blacklist == ()
    assert traces.close_resource == (("shop", ("^/health$",)), ("*", ("ping", "pong")))
    assert traces.tags == (("key1", "value1"), ("number", "5"))
    receive = settings.receive
    assert (receive.trace_path, receive.metric_path, receive.log_path) == ("/a", "/b", "/otel/v1/logs")
    assert receive.grpc == (Address("127.0.0.1", 14317), Address("::1", 14317))
    assert receive.max_grpc_request_bytes == 16 << 20
    assert receive.http == (Address("127.0.0.1", 4318), Address("::1", 4318))


def test_keys_that_are_dead_in_datakit_are_named_with_what_to_do_instead(conf: Path) -> None:
    put(conf, "opentelemetry.conf", OPENTELEMETRY_CONF)
    found = " ".join(notes(conf))
    assert "opentelemetry.conf:20:3: expected_headers has no effect here" in found and "receive.token" in found
    assert "http.http_status_ok has no effect here" in found
    assert "opentelemetry.conf:9:3: traces.keep_rare_resource has no effect" in found


@pytest.mark.parametrize(
    ("key", "value"), [("costomer_tags_all", "customer_tags_all"), ("customer_tags_all", "customer_tags_all")]
)
def test_both_spellings_of_customer_tags_all_count(conf: Path, key: str, value: str) -> None:
    put(conf, "opentelemetry.conf", f"[[inputs.opentelemetry]]\n{key} = true\n")
    assert getattr(loaded(conf).policy, value) is True


@pytest.mark.parametrize("key", ["spilt_service_name", "split_service_name"])
def test_both_spellings_of_split_service_name_count(conf: Path, key: str) -> None:
    put(conf, "opentelemetry.conf", f"[[inputs.opentelemetry]]\n{key} = false\n")
    assert loaded(conf).traces.split_service_name is False


def test_of_several_inputs_the_first_counts_and_a_note_says_so(conf: Path) -> None:
    put(conf, "opentelemetry.conf", "[[inputs.opentelemetry]]\nlog_max = 1\n[[inputs.opentelemetry]]\nlog_max = 2\n")
    assert loaded(conf).traces.log_max_kib == 1
    assert notes(conf) == ["opentelemetry.conf:3:1: 2 tables inputs.opentelemetry; the first counts, the others do not"]


@pytest.mark.parametrize("text", ["", "[inputs]\n", "[[inputs.cpu]]\n", "inputs.opentelemetry = []\n"])
def test_a_file_without_the_input_means_the_defaults(conf: Path, text: str) -> None:
    put(conf, "opentelemetry.conf", text)
    assert loaded(conf).receive == loaded(conf.parent / "conf").receive
    assert any("there is no [[inputs.opentelemetry]]" in note for note in notes(conf))


def test_a_second_file_of_the_same_name_is_not_read_and_a_note_says_so(conf: Path) -> None:
    put(conf, "opentelemetry.conf", "[[inputs.opentelemetry]]\nlog_max = 1\n")
    put(conf, "conf.d/opentelemetry.conf", "[[inputs.opentelemetry]]\nlog_max = 2\n")
    assert loaded(conf).traces.log_max_kib == 1
    assert "is not read" in notes(conf)[0]


def test_a_body_size_below_datakits_least_is_raised_as_in_datakit(conf: Path) -> None:
    put(conf, "datakit.conf", f'[dataway]\nurls = ["{URL}"]\nmax_raw_body_size = 1000\n')
    assert loaded(conf).dataways[0].max_body_bytes == 100 << 10
    assert "is raised to 102400" in notes(conf)[0]


def test_a_number_as_timeout_is_nanoseconds_as_in_go(conf: Path) -> None:
    put(conf, "datakit.conf", f'[dataway]\nurls = ["{URL}"]\ntimeout_v2 = 5000000000\n')
    assert loaded(conf).dataways[0].timeout_s == 5.0


@pytest.mark.parametrize(
    ("told", "wanted", "noted"),
    [
        ("v1", "line_protocol", False),
        ("v2", "protobuf", False),
        ("V2", "protobuf", False),
        ("v3", "line_protocol", True),
    ],
)
def test_an_unknown_content_encoding_is_line_protocol_as_in_datakit(
    conf: Path, told: str, wanted: str, noted: bool
) -> None:
    put(conf, "datakit.conf", f'[dataway]\nurls = ["{URL}"]\ncontent_encoding = "{told}"\n')
    assert loaded(conf).dataways[0].encoding == wanted
    assert bool(notes(conf)) is noted


DATAKIT_ENVIRONMENT: list[tuple[str, str, str, Any]] = [
    ("ENV_DATAWAY_TIMEOUT", "45s", "dataway.timeout_s", 45.0),
    ("ENV_DATAWAY_CONTENT_ENCODING", "v1", "dataway.encoding", "line_protocol"),
    ("ENV_DATAWAY_MAX_RAW_BODY_SIZE", "2097152", "dataway.max_body_bytes", 2 << 20),
    ("ENV_DATAWAY_DISABLE_GZIP", "true", "dataway.gzip", False),
    ("ENV_DATAWAY_DISABLE_GZIP", "anything", "dataway.gzip", False),
    ("ENV_DATAWAY_DISABLE_GZIP", "false", "dataway.gzip", True),
    ("ENV_DATAWAY_HTTP_PROXY", "http://proxy:1", "dataway.proxy", "http://proxy:1"),
    ("ENV_DATAWAY_TLS_INSECURE", "on", "dataway.tls_insecure", True),
    ("ENV_DATAWAY_TLS_INSECURE", "false", "dataway.tls_insecure", False),
    ("ENV_HTTP_LISTEN", "127.0.0.1:1", "receive.api", (Address("127.0.0.1", 1), Address("::1", 1))),
    ("ENV_HTTP_ALLOWED_CORS_ORIGINS", "https://a,https://b", "receive.cors_origins", ("https://a", "https://b")),
    ("ENV_HOSTNAME", "h", "points.hostname", "h"),
    ("ENV_K8S_NODE_NAME", "h", "points.hostname", "h"),
    ("ENV_K8S_CLUSTER_NODE_NAME", "h", "points.hostname", "h"),
    (
        "ENV_GLOBAL_HOST_TAGS",
        "host=h,a=b , c = __datakit_hostname",
        "points.global_tags",
        (("host", "h"), ("a", "b"), ("c", "me")),
    ),
    ("ENV_GLOBAL_TAGS", "host=h", "points.global_tags", (("host", "h"),)),
    ("ENV_CLUSTER_NAME_K8S", "c", "points.global_tags", (("host", "me"), ("cluster_name_k8s", "c"))),
    ("ENV_INPUT_OTEL_CUSTOMER_TAGS", '["a.b", "reg:x,y"]', "policy.customer_tags", ("a.b", "reg:x,y")),
    ("ENV_INPUT_OTEL_CUSTOMER_TAGS_ALL", "true", "policy.customer_tags_all", True),
    ("ENV_INPUT_OTEL_GRPC", '{"addr": "127.0.0.1:1"}', "receive.grpc", (Address("127.0.0.1", 1), Address("::1", 1))),
    ("ENV_INPUT_OTEL_GRPC", '{"max_payload": 4096}', "receive.max_grpc_request_bytes", 4096),
    ("ENV_INPUT_OTEL_GRPC", '{"max_payload": 0}', "receive.max_grpc_request_bytes", 16 << 20),
    ("ENV_INPUT_OTEL_HTTP", '{"logs_api": "/l"}', "receive.log_path", "/l"),
    ("ENV_INPUT_OTEL_TAGS", '{"k": "v", "n": 1}', "traces.tags", (("k", "v"), ("n", "1"))),
    ("ENV_INPUT_OTEL_CLOSE_RESOURCE", '{"*": ["a"]}', "traces.close_resource", (("*", ("a",)),)),
    ("ENV_INPUT_OTEL_SAMPLER", "0.3", "traces.sampling_rate", 0.3),
    ("ENV_INPUT_OTEL_KEEP_RARE_RESOURCE", "true", "traces.keep_rare_resource", True),
    ("ENV_INPUT_OTEL_DEL_MESSAGE", "T", "traces.del_message", True),
    ("ENV_INPUT_OTEL_COMPATIBLE_DDTRACE", "1", "traces.compatible_ddtrace", True),
    ("ENV_INPUT_OTEL_COMPATIBLE_DD_TRACE", "1", "traces.compatible_ddtrace", True),
    ("ENV_INPUT_OTEL_SPLIT_SERVICE_NAME", "false", "traces.split_service_name", False),
    ("ENV_INPUT_OTEL_CLEAN_MESSAGE", "f", "traces.clean_message", False),
    ("ENV_INPUT_OTEL_TRACING_METRIC_ENABLE", "true", "traces.tracing_metrics", True),
    ("ENV_INPUT_OTEL_TRACING_METRIC_TAG_WHITELIST", '["a"]', "traces.tracing_metric_tag_whitelist", ("a",)),
    ("ENV_INPUT_OTEL_TRACING_METRIC_TAG_BLACKLIST", "[]", "traces.tracing_metric_tag_blacklist", ()),
]


def value_of(settings: Settings, name: str) -> Any:
    section, _, key = name.partition(".")
    return getattr(settings.dataways[0] if section == "dataway" else getattr(settings, section), key)


@pytest.mark.parametrize(("name", "told", "setting", "wanted"), DATAKIT_ENVIRONMENT)
def test_datakits_environment_names_work(conf: Path, name: str, told: str, setting: str, wanted: Any) -> None:
    hostname = {} if setting == "points.hostname" else {"ENV_HOSTNAME": "me"}
    assert value_of(loaded(conf, **hostname, ENV_DATAWAY=URL, **{name: told}), setting) == wanted


def test_every_environment_name_of_datakit_is_in_the_table_above() -> None:
    assert {name for name, *_ in DATAKIT_ENVIRONMENT} | {"ENV_DATAWAY"} == set(ENVIRONMENT)


def test_env_dataway_names_several(conf: Path) -> None:
    assert [found.url for found in loaded(conf, ENV_DATAWAY=f"{URL}, {URL}2").dataways] == [URL, f"{URL}2"]


def test_the_environment_wins_over_files_and_locums_names_over_datakits(conf: Path) -> None:
    put(conf, "opentelemetry.conf", "[[inputs.opentelemetry]]\nlog_max = 1\n")
    assert loaded(conf).traces.log_max_kib == 1
    put(conf, "locum.toml", "[traces]\nlog_max_kib = 2\ndel_message = false\n")
    assert loaded(conf).traces.log_max_kib == 2
    assert loaded(conf, LOCUM_TRACES_LOG_MAX_KIB="3").traces.log_max_kib == 3
    assert loaded(conf, ENV_INPUT_OTEL_DEL_MESSAGE="true").traces.del_message is True
    both = {"ENV_INPUT_OTEL_DEL_MESSAGE": "true", "LOCUM_TRACES_DEL_MESSAGE": "false"}
    assert loaded(conf, **both).traces.del_message is False


def test_an_empty_value_in_the_environment_is_none(conf: Path) -> None:
    assert loaded(conf, ENV_DATAWAY="", LOCUM_RECEIVE_TOKEN="", ENV_INPUT_OTEL_CUSTOMER_TAGS="").dataways == ()


@pytest.mark.parametrize(
    ("name", "told", "wanted"),
    [
        ("ENV_INPUT_OTEL_CUSTOMER_TAGS", "[", "not valid JSON|no valid JSON"),
        ("ENV_INPUT_OTEL_CUSTOMER_TAGS", '["reg:("]', "policy.customer_tags: pattern '\\('"),
        ("ENV_INPUT_OTEL_CUSTOMER_TAGS", "[1]", "write a text in quotes"),
        ("ENV_INPUT_OTEL_GRPC", "[]", "write a JSON object"),
        ("ENV_INPUT_OTEL_SAMPLER", "2", "at most 1"),
        ("ENV_INPUT_OTEL_SAMPLER", "nan", "write a number"),
        ("ENV_GLOBAL_HOST_TAGS", "a", "write k=v,k=v"),
        ("ENV_HTTP_LISTEN", "9529", "write HOST:PORT"),
        ("LOCUM_RECEIVE_MAX_SERIES", "many", "write a whole number"),
        ("LOCUM_BUFFER_WHEN_FULL", "panic", "choose one of refuse, drop_oldest"),
    ],
)
def test_a_bad_value_in_the_environment_is_named_by_its_name(conf: Path, name: str, told: str, wanted: str) -> None:
    (found,) = errors(conf, **{name: told})
    assert found.startswith(f"environment {name}: ")
    assert re.search(wanted, found)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("ENV_INPUT_OTEL_CUSTOMER_TAG", "did you mean ENV_INPUT_OTEL_CUSTOMER_TAGS?"),
        ("ENV_DATAWAY_MAX_RETRY_COUNT", "it has no effect here"),
        ("LOCUM_RECEIVE_GRPCS", "did you mean LOCUM_RECEIVE_GRPC?"),
    ],
)
def test_a_name_in_the_environment_without_effect_is_a_note(conf: Path, name: str, advice: str) -> None:
    (found,) = notes(conf, **{name: "x"})
    assert found.startswith(f"environment {name}: ") and advice in found


SAMPLES: dict[str, tuple[str, Any]] = {
    "receive.grpc": ("127.0.0.1:1,[::1]:2", (Address("127.0.0.1", 1), Address("::1", 2))),
    "receive.http": ("localhost:3", (Address("127.0.0.1", 3), Address("::1", 3))),
    "receive.api": ("127.0.0.2:0", (Address("127.0.0.2", 0),)),
    "receive.trace_path": ("/t", "/t"),
    "receive.metric_path": ("/m", "/m"),
    "receive.log_path": ("/l", "/l"),
    "receive.max_request_bytes": ("1MiB", 1 << 20),
    "receive.max_grpc_request_bytes": ("1KB", None),
    "receive.max_inflight_bytes": ("1GiB", 1 << 30),
    "receive.max_inflight_requests": ("7", 7),
    "receive.read_timeout_s": ("1m", 60.0),
    "receive.token": ("secret", "secret"),
    "receive.allow_insecure": ("yes", True),
    "receive.cors_origins": ("https://a, https://b", ("https://a", "https://b")),
    "receive.remote_ip": ("off", False),
    "receive.max_series": ("10", 10),
    "points.parity": ("strict", "strict"),
    "points.host_tag": ("resource", "resource"),
    "points.hostname": ("h", "h"),
    "points.global_tags": ('{"host": "h", "n": 2}', (("host", "h"), ("n", "2"))),
    "traces.split_service_name": ("0", False),
    "traces.clean_message": ("no", False),
    "traces.del_message": ("1", True),
    "traces.json_marshaler": ("jsoniter", "jsoniter"),
    "traces.compatible_ddtrace": ("on", True),
    "traces.compatible_zhaoshang": ("on", True),
    "traces.sampling_rate": ("0", 0.0),
    "traces.close_resource": ('{"a": ["b"]}', (("a", ("b",)),)),
    "traces.keep_rare_resource": ("on", True),
    "traces.tags": ("a=b", (("a", "b"),)),
    "traces.tracing_metrics": ("on", True),
    "traces.tracing_metric_tag_whitelist": ("a,b", ("a", "b")),
    "traces.tracing_metric_tag_blacklist": ('["a"]', ("a",)),
    "traces.log_max_kib": ("1", 1),
    "policy.customer_tags": ('["a", "reg:[a,b]"]', ("a", "reg:[a,b]")),
    "policy.customer_tags_all": ("true", True),
    "buffer.segment_bytes": ("100MB", 100_000_000),
    "buffer.segment_age_s": ("1h30m", 5400.0),
    "buffer.max_bytes": ("1TB", 10**12),
    "buffer.max_age_s": ("7d", 7 * 86400.0),
    "buffer.min_free_disk_bytes": ("0", 0),
    "buffer.when_full": ("drop_oldest", "drop_oldest"),
    "buffer.memory_limit_bytes": ("128MiB", 128 << 20),
    "buffer.threads": ("2", 2),
    "dataway.encoding": ("v1", "line_protocol"),
    "dataway.gzip": ("false", False),
    "dataway.max_body_bytes": ("200KiB", 200 << 10),
    "dataway.timeout_s": ("500ms", 0.5),
    "dataway.flush_interval_s": ("2", 2.0),
    "dataway.connections": ("1", 1),
    "dataway.proxy": ("http://p:1", "http://p:1"),
    "dataway.tls_insecure": ("true", True),
}
"""A text for every setting, and what it is then; None: it must be refused."""

BESIDE = {"receive.tls_cert", "receive.tls_key", "receive.token_file", "dataway.urls", "dataway.url_file",
          "sinks.file.path", "sinks.file.rotate_bytes"}  # fmt: skip
"""Settings with a test of their own."""


def test_every_setting_has_a_sample() -> None:
    every = {f"{section}.{key}" for section in SECTIONS for key in settable(section)}
    assert every == SAMPLES.keys() | BESIDE


@pytest.mark.parametrize("setting", SAMPLES)
def test_every_setting_has_an_environment_name(conf: Path, setting: str) -> None:
    told, wanted = SAMPLES[setting]
    section, _, key = setting.partition(".")
    environ = {"ENV_DATAWAY": URL, environment_name(section, key): told}
    if wanted is None:
        assert f"{setting}: " in errors(conf, **environ)[0]
    else:
        assert value_of(loaded(conf, **environ), setting) == wanted


@pytest.mark.parametrize("setting", SAMPLES)
def test_every_setting_is_read_from_locum_toml(conf: Path, setting: str) -> None:
    told, wanted = SAMPLES[setting]
    section, _, key = setting.partition(".")
    put(conf, "locum.toml", f"[{section}]\n{key} = '{told}'\n")
    if wanted is None:
        assert errors(conf)[0].startswith(f"locum.toml:2:1: {setting}: ")
    else:
        assert value_of(loaded(conf, ENV_DATAWAY=URL), setting) == wanted


LOCUM_TOML = """
[receive]
http = ["localhost:4318", "127.0.0.1:5318"]
max_request_bytes = "64MiB"
max_inflight_bytes = 268435456
read_timeout_s = 10
cors_origins = []
[dataway]
flush_interval_s = "500ms"
[traces]
tags = { a = "b" }
[traces.close_resource]
"*" = ["x"]
[[sinks.file]]
path = "lines"
[[sinks.file]]
path = "/tmp/elsewhere"
rotate_bytes = "10MB"
"""


def test_locum_toml_has_readable_sizes_and_times_and_file_sinks(conf: Path) -> None:
    put(conf, "locum.toml", LOCUM_TOML)
    settings = loaded(conf, ENV_DATAWAY=URL)
    assert settings.receive.http == (Address("127.0.0.1", 4318), Address("::1", 4318), Address("127.0.0.1", 5318))
    assert (settings.receive.max_request_bytes, settings.receive.read_timeout_s) == (64 << 20, 10.0)
    assert settings.receive.cors_origins == ()
    assert settings.dataways[0].flush_interval_s == 0.5
    assert settings.traces.tags == (("a", "b"),) and settings.traces.close_resource == (("*", ("x",)),)
    first, second = settings.files
    assert (first.path, first.rotate_bytes) == (conf.parent / "var" / "lines", 64 << 20)
    assert (second.path, second.rotate_bytes) == (Path("/tmp/elsewhere"), 10_000_000)


def test_the_file_sink_has_environment_names_too(conf: Path) -> None:
    put(conf, "locum.toml", LOCUM_TOML)
    (file,) = loaded(conf, LOCUM_SINKS_FILE_PATH="/x", LOCUM_SINKS_FILE_ROTATE_BYTES="1GiB").files
    assert (file.path, file.rotate_bytes) == (Path("/x"), 1 << 30)


def test_secrets_may_stand_in_files_beside_the_configuration(conf: Path, tmp_path: Path) -> None:
    put(conf, "token", "a-secret\n")
    (tmp_path / "url").write_text(f"{URL}\n")
    put(conf, "locum.toml", f'[receive]\ntoken_file = "token"\n[dataway]\nurl_file = "{tmp_path}/url"\n')
    settings = loaded(conf)
    assert settings.receive.token == "a-secret"
    assert [dataway.url for dataway in settings.dataways] == [URL]
    (dataway,) = loaded(conf, LOCUM_DATAWAY_URL_FILE=str(tmp_path / "url")).dataways
    assert dataway.url == URL


@pytest.mark.parametrize(("content", "wanted"), [(None, "cannot be read"), (b"", "is empty"), (b"\xff", "no text")])
def test_a_secrets_file_that_does_not_help_is_an_error(conf: Path, content: bytes | None, wanted: str) -> None:
    put(conf, "locum.toml", '[receive]\ntoken_file = "token"\n')
    if content is not None:
        (conf / "token").write_bytes(content)
    (found,) = errors(conf)
    assert found.startswith("locum.toml:2:1: receive.token_file: ") and wanted in found


def test_urls_of_locum_toml_take_the_place_of_datakits(conf: Path) -> None:
    put(conf, "datakit.conf", f'[dataway]\nurls = ["{URL}"]\n')
    put(conf, "locum.toml", '[dataway]\nurls = ["http://a?token=t", "http://b?token=t"]\n')
    assert [dataway.url for dataway in loaded(conf).dataways] == ["http://a?token=t", "http://b?token=t"]
