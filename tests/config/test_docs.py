"""The samples and the documentation say what the program does."""

from __future__ import annotations

import re
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from gateway.config_draft import SECTIONS, environment_name, settable
from gateway.config_environment import ENVIRONMENT
from gateway.config_files import check, load
from gateway.config_values import shown
from tests.config.told import URL, loaded, put

ROOT = Path(__file__).parent.parent.parent


def test_the_samples_are_without_errors_and_change_what_they_say() -> None:
    assert [finding for finding in check(ROOT / "conf", ROOT / "var", {}) if finding.level == "error"] == []
    settings = load(ROOT / "conf", ROOT / "var", {})
    assert settings.policy.customer_tags_all is True
    assert settings.receive.max_grpc_request_bytes == 16 << 20
    assert settings.notes == ()


def test_the_sample_locum_toml_has_every_key_with_its_default(conf: Path) -> None:
    text = (ROOT / "conf" / "locum.toml").read_text()
    for section in SECTIONS:
        for key in settable(section):
            assert re.search(rf"^# ?{key} = ", text, re.MULTILINE), f"{section}.{key} is missing in conf/locum.toml"
    spelled_out = re.sub(r"^# ?(?=[a-z_]+ = |\[)", "", text, flags=re.MULTILINE)
    told = tomllib.loads(spelled_out)
    examples = {("receive", "tls_cert"), ("receive", "tls_key"), ("receive", "token"), ("receive", "token_file"),
                ("points", "global_tags"), ("points", "hostname"), ("traces", "sampling_rate"), ("dataway", "urls"),
                ("dataway", "url_file"), ("dataway", "proxy")}  # fmt: skip
    for section, key in examples:
        told[section].pop(key)
    told.pop("sinks")
    put(conf, "all.toml", "")
    (conf / "locum.toml").write_text(_as_toml(told))
    assert loaded(conf, ENV_HOSTNAME="h") == loaded(conf.parent / "conf", ENV_HOSTNAME="h")
    (conf / "locum.toml").unlink()
    defaults = loaded(conf, ENV_HOSTNAME="h", ENV_DATAWAY=URL)
    (conf / "locum.toml").write_text(_as_toml(told))
    assert loaded(conf, ENV_HOSTNAME="h", ENV_DATAWAY=URL) == defaults


def _as_toml(told: dict[str, dict[str, Any]]) -> str:
    lines = []
    for section, table in told.items():
        lines.append(f"[{section}]")
        for key, value in table.items():
            if isinstance(value, dict):
                lines.append(f"{key} = {{}}")
            else:
                lines.append(f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}")
    return "\n".join(lines) + "\n"


def default_of(section: str, key: str) -> str:
    """What a setting is if nobody sets it, as `locum check` shows it."""
    defaults = {item.name: item.default for item in fields(SECTIONS[section]) if item.default is not MISSING}
    return shown(key, defaults.get(key), is_secret=False)


def test_every_setting_stands_in_the_documentation_with_its_environment_name() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    for section in SECTIONS:
        for key in settable(section):
            row = re.search(rf"^\| `{key}` \| (.*) \| `{environment_name(section, key)}` \|", text, re.MULTILINE)
            assert row, f"{section}.{key} is missing in docs/configuration.md"
            assert row[1].strip("`") == default_of(section, key), f"{section}.{key} has another default"
    for name in ENVIRONMENT:
        assert f"`{name}`" in text, f"{name} is missing in docs/configuration.md"
