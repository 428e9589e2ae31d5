"""disagg.config and disagg.settings: sizes, the order of sources, and what each refusal says."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from disagg.config import Config, ServerConfig, parse_address, parse_size
from disagg.errors import ConfigError
from disagg.settings import SETTINGS, Setting, dump_toml, load_config


def write(folder: Path, text: str) -> Path:
    path = folder / "disagg.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(toml: Path | None = None, environ: Mapping[str, str] = {}, flags: Mapping[str, Any] = {}) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(toml, environ, flags)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ sources


def test_without_any_source_everything_is_built_in() -> None:
    """No file, no variables, no flags: the defaults of the structs, and every origin says so."""
    config, origins = load_config(None, {"PATH": "/bin", "DISAGGREGATE": "x"}, {})
    assert config == Config()
    assert set(origins.values()) == {"built-in"}
    assert origins.keys() == SETTINGS.keys()


def test_later_sources_win_and_the_origin_follows(tmp_path: Path) -> None:
    """built-in < TOML < environment < flags, each setting by itself."""
    path = write(tmp_path, "[server]\nport = 1\nhost = '::1'\ndrain_s = 5\n[workers]\npin_cpus = false")
    environ = {"DISAGG_SERVER__PORT": "2", "DISAGG_SERVER__HOST": "localhost"}
    config, origins = load_config(path, environ, {"server.port": "3"})
    assert config.server == ServerConfig(port=3, host="localhost", drain_s=5.0)
    assert not config.workers.pin_cpus
    assert origins["server.port"] == "--port"
    assert origins["server.host"] == "DISAGG_SERVER__HOST"
    assert origins["server.drain_s"] == str(path)
    assert origins["server.keepalive_s"] == "built-in"


def values_of(setting: Setting) -> st.SearchStrategy[Any]:
    if setting.choices:
        return st.sampled_from(setting.choices)
    if setting.name == "kv.memory":
        return st.just("auto") | st.integers(1, 2**40).map(lambda n: f"{n}KiB")
    if setting.name == "cluster.listen":
        return st.sampled_from(["", "0.0.0.0:7000", "[::1]:0", "node-1:65535"])
    if setting.name == "tracing.otlp_endpoint":
        return st.sampled_from(["", "http://127.0.0.1:4318", "https://collector.example/v1/traces", "http://[::1]:4318/"])
    if setting.name == "server.host":
        return st.sampled_from(["::1", "0.0.0.0", "box.example", "bücher.example"])
    if setting.type is bool:
        return st.booleans()
    if setting.type is str:
        return st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
    low = setting.meta.ge if setting.meta.ge is not None else setting.meta.gt or 0
    if setting.type is int:
        return st.integers(int(low), int(setting.meta.le or 2**40))
    return st.floats(low, setting.meta.le, exclude_min=setting.meta.gt is not None, allow_infinity=False, allow_nan=False)


some_settings = st.fixed_dictionaries({}, optional={name: values_of(setting) for name, setting in SETTINGS.items()})


@given(some_settings)
@example({"model.name": '\x00\x1f\x7f\x85 "\\ \u2028 \U0001f600'})
def test_every_configuration_survives_toml(values: dict[str, Any]) -> None:
    """What ``config show`` prints is TOML that says the same, with and without the comments."""
    config, origins = load_config(None, {}, values)
    for text in (dump_toml(config), dump_toml(config, origins)):
        assert msgspec.convert(tomllib.loads(text), Config) == config


@given(some_settings)
def test_environment_and_flags_read_the_same_text(values: dict[str, Any]) -> None:
    """A value spelled as text means the same in a variable, in a flag, and as the typed value itself."""
    typed, _ = load_config(None, {}, values)
    texts = {name: str(value) for name, value in values.items()}
    assert load_config(None, {}, texts)[0] == typed
    assert load_config(None, {SETTINGS[name].env: text for name, text in texts.items()}, {})[0] == typed


# ------------------------------------------------------------------------------------------------ the table of settings


def test_names_are_unique_and_described() -> None:
    """Every field has a description, and a flag and a variable of its own."""
    settings = SETTINGS.values()
    assert all(setting.meta.description for setting in settings)
    for names in ([s.flag for s in settings], [s.env for s in settings], [s.flag.replace("--", "--no-") for s in settings]):
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_each_default_is_allowed(setting: Setting) -> None:
    """A default that its own limits refuse could not be written into a file."""
    assert msgspec.convert(setting.default, setting.annotation) == setting.default


# ------------------------------------------------------------------------------------------------ refusals


def test_unknown_names_come_with_a_suggestion(tmp_path: Path) -> None:
    """A misspelt section, setting or variable is refused, and the nearest known name is offered."""
    assert "did you mean server.port?" in refusal(write(tmp_path, "[server]\nprot = 1"))
    assert "did you mean workers.prefill?" in refusal(write(tmp_path, "[server]\nprefill = 2"))
    assert "did you mean workers?" in refusal(write(tmp_path, "[worker]\nprefill = 2"))
    assert "did you mean server.port?" in refusal(write(tmp_path, "port = 9000"))
    assert "did you mean DISAGG_SERVER__PORT?" in refusal(environ={"DISAGG_SERVER_PORT": "1"})
    assert "unknown environment variable DISAGG_X" in refusal(environ={"DISAGG_X": "1"})


def test_a_section_must_be_a_table(tmp_path: Path) -> None:
    """``server = 8000`` is refused with how it is written."""
    assert "write [server]" in refusal(write(tmp_path, "server = 8000"))


def test_a_refusal_names_setting_origin_value_and_what_is_allowed(tmp_path: Path) -> None:
    """The line on the screen is enough to repair it, whatever the source."""
    path = write(tmp_path, "[server]\nport = 99999")
    assert refusal(path) == f"server.port = 99999 (from {path}): must be an integer at least 0 and at most 65535"
    assert refusal(environ={"DISAGG_SERVER__DRAIN_S": "soon"}) == (
        "server.drain_s = 'soon' (from DISAGG_SERVER__DRAIN_S): must be a number at least 0"
    )
    assert refusal(flags={"workers.mode": "apart"}) == (
        "workers.mode = 'apart' (from --mode): must be one of disagg, colocated, auto"
    )
    assert refusal(environ={"DISAGG_KV__POISON": "perhaps"}).endswith("must be true or false")


def test_a_bad_value_is_refused_even_where_it_would_lose(tmp_path: Path) -> None:
    """A flag does not hide a broken file."""
    assert "server.port = -1" in refusal(write(tmp_path, "[server]\nport = -1"), flags={"server.port": "8000"})


def test_toml_has_types(tmp_path: Path) -> None:
    """Text in place of a number is an error in TOML, though it is how variables and flags spell one."""
    assert "server.port = '8000'" in refusal(write(tmp_path, "[server]\nport = '8000'"))
    assert "server.port = true" in refusal(write(tmp_path, "[server]\nport = true"))
    assert "server.port = list" in refusal(write(tmp_path, "[server]\nport = [1]"))


@pytest.mark.parametrize("number", [math.nan, math.inf, "nan", "inf", "-inf", "1e400"])
def test_numbers_are_finite(number: float | str) -> None:
    """NaN passes every comparison and infinity waits for ever: neither is a number of seconds."""
    assert "server.drain_s" in refusal(flags={"server.drain_s": number})


def test_files_that_cannot_be_used_say_why(tmp_path: Path) -> None:
    """Missing, unreadable as text, or no TOML: one line with the path."""
    assert "No such file" in refusal(tmp_path / "missing.toml")
    assert "is not TOML" in refusal(write(tmp_path, "[server\nport"))
    (tmp_path / "latin.toml").write_bytes(b"[model]\nname = '\xe9'")
    assert "is not TOML" in refusal(tmp_path / "latin.toml")


@pytest.mark.parametrize("host", ["", "127.0.0.1:8000", "http://box", "[::1]", "two words"])
def test_a_host_is_an_address_or_a_name(host: str) -> None:
    """What cannot be listened on is refused before anything starts."""
    assert "server.host" in refusal(flags={"server.host": host})


def test_an_address_is_a_host_and_a_port() -> None:
    """What other nodes dial: names, IPv4 and bracketed IPv6, each with a port; anything else is refused with an example."""
    assert parse_address("node-1:7000") == ("node-1", 7000)
    assert parse_address("[::1]:0") == ("::1", 0)
    for text in ("", "7000", ":7000", "::1:7000", "host:", "host:65536", "host:x", "host:²"):
        with pytest.raises(ConfigError, match="is not HOST:PORT"):
            parse_address(text)
    assert "(from --cluster-listen): must be empty or HOST:PORT" in refusal(flags={"cluster.listen": "7000"})


def test_kv_memory_is_auto_or_a_size() -> None:
    """A size that cannot be read is refused at once, not by the worker."""
    assert "(from --kv-memory): must be auto or a size" in refusal(flags={"kv.memory": "lots"})
    assert load_config(None, {}, {"kv.memory": "64 MiB"})[0].kv.memory == "64 MiB"


# ------------------------------------------------------------------------------------------------ sizes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        ("1b", 1),
        ("2GiB", 2 << 30),
        ("2gib", 2 << 30),
        ("2Gi", 2 << 30),
        ("2G", 2 << 30),
        ("2GB", 2_000_000_000),
        (" 1.5 KiB ", 1536),
        ("0.1MB", 100_000),
        ("3T", 3 << 40),
    ],
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    """Decimal units are powers of 1000, binary units and bare letters powers of 1024; no rounding on the way."""
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "0.0001KB", "1e3", "1,5GB", "2 PiB", "2GiBs", "inf", "٣GB", "9" * 400])
def test_other_sizes_are_refused(text: str) -> None:
    """Whatever is no positive number with a known unit raises ConfigError and nothing else."""
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)


@given(st.text())
def test_sizes_never_raise_anything_else(text: str) -> None:
    """Any text is a positive size or a ConfigError."""
    try:
        assert parse_size(text) >= 1
    except ConfigError as error:
        assert "is not a size" in str(error)  # noqa: PT017  # both outcomes are right
