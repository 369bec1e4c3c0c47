"""The whitelist: which attributes of a span come out, and which tags of a metric leave."""

from __future__ import annotations

import time

import pytest

from gateway.config import PolicySettings
from gateway.model import ConfigError, Kind, Series
from gateway.policy.rules import PUBLIC_KEYS, Rules, compile_pattern, flat_expression


def rules(*customer_tags: str, keeps_all: bool = False) -> Rules:
    return Rules.compile(PolicySettings(customer_tags, keeps_all))


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("db.system", "db_system"),
        ("http.request.method", "http_method"),
        ("http.response.status_code", "http_status_code"),
        ("messaging.message.id", "messaging_message_id"),
        ("host", "host"),
        ("project.name", "project_name"),
        ("team", "team"),
        ("key_1", "key_1"),
        ("monkey.x", "monkey_x"),
        ("ke", None),
        ("KEY_4", None),
        ("project", "project"),
        ("project.names", None),
        ("", None),
    ],
)
def test_a_span_gives_up_the_public_keys_the_named_and_the_matched(key: str, wanted: str | None) -> None:
    assert rules("project.name", "reg:key_*", "team").span_key(key) == wanted


def test_without_a_whitelist_only_the_public_keys_come_out() -> None:
    assert rules().span_key("team") is None
    assert {key: rules().span_key(key) for key in PUBLIC_KEYS} == PUBLIC_KEYS


def test_customer_tags_all_takes_all_and_the_public_names_stay() -> None:
    assert rules(keeps_all=True).span_key("a.b") == "a_b"
    assert rules(keeps_all=True).span_key("http.request.method") == "http_method"
    assert rules("http.request.method").span_key("http.request.method") == "http_method"
    assert rules(keeps_all=True).span_key("") is None


def test_an_entry_without_a_text_names_nothing() -> None:
    assert rules("").span_key("") is None
    assert rules("").keeps_metric_tag("") is False


@pytest.mark.parametrize(
    ("tag", "kept"),
    [
        ("hw_id", True),
        ("hw_idx", False),
        ("gpu_uuid", True),
        ("xgpu_uuid", False),
        ("a_key_b", True),
        ("host", True),
        ("unit", True),
        ("le", True),
        ("quantile", True),
        ("service_name", False),
        ("scope_name", False),
    ],
)
def test_of_a_metric_the_named_tags_leave_and_those_that_give_it_its_meaning(tag: str, kept: bool) -> None:
    assert rules("hw.id", r"reg:^gpu\.", "reg:key").keeps_metric_tag(tag) is kept


@pytest.mark.parametrize("settings", [PolicySettings(), PolicySettings(("a",), True), PolicySettings((), True)])
def test_without_a_whitelist_every_tag_of_a_metric_leaves(settings: PolicySettings) -> None:
    found = Rules.compile(settings)
    assert not found.touches_metrics
    assert found.keeps_metric_tag("anything")


def test_a_series_that_loses_nothing_is_the_same_object() -> None:
    series = Series("otel_service", "m", (("hw_id", "1"), ("job", "a"), ("unit", "")), Kind.DOUBLE, unit="")
    assert rules().apply(series) is series
    assert rules("hw.id", "job").apply(series) is series
    fewer = rules("hw.id").apply(series)
    assert fewer.tags == (("hw_id", "1"), ("unit", ""))
    assert (fewer.field, fewer.kind) == (series.field, series.kind)
    assert rules("hw.id").touches_metrics


@pytest.mark.parametrize(
    ("expression", "flat"),
    [
        (r"^hw\.", "^hw[._]"),
        (r"a\\.b", r"a\\.b"),
        (r"[.a]x", "[._a]x"),
        (r"[\.a]x", r"[\._a]x"),
        (r"^hw\.[^.]+$", "^hw[._][^.]+$"),
        ("key_*", "key_*"),
        ("\\", "\\"),
    ],
)
def test_in_an_expression_for_tags_a_literal_dot_is_an_underscore_too(expression: str, flat: str) -> None:
    assert flat_expression(expression) == flat


@pytest.mark.parametrize("expression", ["(", "a(?!b)", "[z-a]", r"\1", "(a{1000}){1000}", "*"])
def test_an_expression_that_does_not_compile_is_a_config_error_with_its_reason(expression: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rules("fine", f"reg:{expression}")
    assert repr(expression) in str(caught.value)
    assert "RE2" in str(caught.value)


def test_a_pattern_that_takes_others_years_takes_a_moment() -> None:
    matches = compile_pattern("^(a+)+$")
    began = time.process_time()
    assert not matches("a" * 50_000 + "b")
    assert time.process_time() - began < 1


def test_keys_without_end_do_not_fill_the_memory() -> None:
    found = rules("reg:x")
    for number in range(20_000):
        found.span_key(f"k{number}")
    assert found.span_key.cache_info().currsize < 10_000  # type: ignore[attr-defined]
