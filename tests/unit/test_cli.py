"""disagg.cli: flags come from the structs, exit codes mean what they say, expected failures are one line."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import disagg
from disagg import chat, cli
from disagg.config import Config
from disagg.errors import ConfigError, StartupError
from disagg.launcher import ProcessLauncher
from disagg.settings import SETTINGS, dump_toml, load_config


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Stands in for the server: the configurations that ``disagg serve`` was run with."""
    configs: list[Config] = []

    def run(config: Config, launcher: ProcessLauncher) -> int:
        configs.append(config)
        return 7

    stand_in_for_serve(monkeypatch, run)
    return configs


def stand_in_for_serve(
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[[Config, ProcessLauncher], int],
    start_ahead: Callable[[ProcessLauncher, int], None] = lambda launcher, count: None,
) -> None:
    module = types.ModuleType("disagg.serve")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "disagg.serve", module)
    monkeypatch.setattr(ProcessLauncher, "start_ahead", start_ahead)


def usage_error(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_serve_passes_the_flags_and_returns_the_servers_exit_code(served: list[Config]) -> None:
    """Flags in either spelling reach the server's Config; what was not given stays at its default."""
    argv = ["serve", "--port=9000", "--model", "null", "--no-pin-cpus", "--kv-memory", "1GiB", "--log-format", "json"]
    assert cli.main(argv) == 7
    flags = {"server.port": 9000, "model.path": "null", "workers.pin_cpus": False, "kv.memory": "1GiB", "log.format": "json"}
    assert served == [load_config(None, {}, flags)[0]]


def test_serve_reads_the_file_and_the_environment(served: list[Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three sources meet in the order that is documented."""
    (tmp_path / "a.toml").write_text("[server]\nport = 1\n[workers]\nprefill = 2\ndecode = 2")
    monkeypatch.setenv("DISAGG_WORKERS__PREFILL", "3")
    assert cli.main(["serve", "--config", str(tmp_path / "a.toml"), "--port", "4"]) == 7
    (config,) = served
    assert (config.server.port, config.workers.prefill, config.workers.decode) == (4, 3, 2)


def test_workers_load_while_the_server_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many processes as there will be workers are started before the server is imported; none for wrong settings."""
    counts: list[int] = []

    def start_ahead(launcher: ProcessLauncher, count: int) -> None:
        counts.append(count)

    stand_in_for_serve(monkeypatch, lambda config, launcher: 0, start_ahead)
    assert cli.main(["serve", "--mode", "disagg", "--prefill", "2", "--decode", "3"]) == 0
    assert cli.main(["serve", "--mode", "colocated", "--mixed", "4"]) == 0
    assert cli.main(["serve", "--mixed", "none"]) == 2
    assert counts == [5, 4]


def test_every_setting_is_in_the_help_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    """``disagg serve --help`` is complete: flag, description and default of each field."""
    assert usage_error("serve", "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    for setting in SETTINGS.values():
        assert f" {setting.flag}" in text
        assert " ".join(setting.meta.description.split()) in text
    assert "(default: 8000)" in text
    assert "(default: true)" in text


def test_help_and_version_succeed(capsys: pytest.CaptureFixture[str]) -> None:
    """They print to stdout and exit with 0."""
    assert usage_error("--help") == 0
    assert "examples:" in capsys.readouterr().out
    assert usage_error("--version") == 0
    assert capsys.readouterr().out == f"disagg {disagg.__version__}\n"


@pytest.mark.parametrize("argv", [[], ["sevre"], ["serve", "--no-such-flag"], ["serve", "--por", "1"], ["config"]])
def test_wrong_usage_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown commands and flags, abbreviations among them, are refused with the usage."""
    assert usage_error(*argv) == 2
    assert "usage: disagg" in capsys.readouterr().err


def test_a_wrong_setting_is_one_line_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback for what the operator can repair."""
    assert cli.main(["serve", "--port", "70000"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("disagg: error: server.port = '70000' (from --port): must be")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("raised", "code"), [(StartupError("port 8000 is taken"), 1), (ConfigError("no"), 2), (KeyboardInterrupt(), 130)]
)
def test_exit_codes_tell_whose_fault_it_is(
    raised: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """1: the host cannot; 2: the settings are wrong; 130: interrupted, silently."""

    def run(config: Config, launcher: ProcessLauncher) -> int:
        raise raised

    stand_in_for_serve(monkeypatch, run)
    assert cli.main(["serve"]) == code
    assert capsys.readouterr().err == (f"disagg: error: {raised}\n" if str(raised) else "")


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no name in disagg.errors keeps its traceback."""

    def run(config: Config, launcher: ProcessLauncher) -> int:
        raise ZeroDivisionError

    stand_in_for_serve(monkeypatch, run)
    with pytest.raises(ZeroDivisionError):
        cli.main(["serve"])


def test_config_show_prints_what_serve_would_use(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain, it is a file that can be used as it is; with --origin each line says where it came from."""
    monkeypatch.setenv("DISAGG_KV__POISON", "true")
    assert cli.main(["config", "show", "--port", "1"]) == 0
    text = capsys.readouterr().out
    assert text == dump_toml(load_config(None, {}, {"server.port": 1, "kv.poison": True})[0])
    assert cli.main(["config", "show", "--origin", "--port", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "port = 1  # --port" in lines
    assert "poison = true  # DISAGG_KV__POISON" in lines
    assert 'host = "127.0.0.1"  # built-in' in lines


@pytest.fixture
def chats(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def run(**arguments: Any) -> int:
        calls.append(arguments)
        return 0

    monkeypatch.setattr(chat, "run", run)
    return calls


def test_chat_hands_the_serve_flags_to_its_own_server(chats: list[dict[str, Any]], served: list[Config], tmp_path: Path) -> None:
    """The server it starts has exactly the settings that were given, and the options of the request are not among them."""
    path = tmp_path / "a.toml"
    path.write_text("[kv]\nblock_size = 8")
    argv = ["--model=null", "--prefill", "2", "--no-prefix-cache", "--kv-poison", "--config", str(path)]
    assert cli.main(["chat", *argv, "--temperature", "0", "--max-tokens", "5", "--system", "Be brief."]) == 0
    (call,) = chats
    assert (call["url"], call["model"], call["system"]) == (None, None, "Be brief.")
    assert call["options"] == {"temperature": 0.0, "max_tokens": 5}
    cli.main(["serve", *call["serve_arguments"]])
    cli.main(["serve", *argv])
    assert served[0] == served[1]


def test_chat_with_a_url_takes_a_model_name_and_no_server_settings(
    chats: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A flag that could have no effect is an error rather than ignored."""
    assert cli.main(["chat", "--url", "http://127.0.0.1:1", "--model", "m"]) == 0
    assert (chats[0]["url"], chats[0]["model"], chats[0]["serve_arguments"]) == ("http://127.0.0.1:1", "m", [])
    assert cli.main(["chat", "--url", "http://127.0.0.1:1", "--prefill", "2"]) == 2
    assert "--prefill" in capsys.readouterr().err
    assert len(chats) == 1


def test_chat_checks_the_settings_before_it_starts_anything(chats: list[dict[str, Any]]) -> None:
    """A wrong flag is refused by the command itself."""
    assert cli.main(["chat", "--port", "x"]) == 2
    assert chats == []
