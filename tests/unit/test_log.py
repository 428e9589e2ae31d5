"""disagg.log: one line per event, one form for our events and the standard library's, nothing of a frame's variables."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from disagg.config import LogConfig
from disagg.log import configure


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(False)
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return [json.loads(line) for line in captured.err.splitlines()]


def test_an_event_is_one_json_object_with_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    """Name, level, logger, UTC time, the process's bound fields and the event's own; newlines inside stay inside."""
    configure(LogConfig(format="json"), worker="prefill-0")
    structlog.get_logger("disagg.x").info("loaded", nbytes=3, what="a\nb", blocks=[1, 2])
    (line,) = lines(capsys)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "loaded",
        "level": "info",
        "logger": "disagg.x",
        "worker": "prefill-0",
        "nbytes": 3,
        "what": "a\nb",
        "blocks": [1, 2],
    }


def test_the_standard_library_takes_the_same_way(capsys: pytest.CaptureFixture[str]) -> None:
    """Records of other libraries and Python's warnings get the same fields."""
    configure(LogConfig(format="json"), worker="decode-1")
    logging.getLogger("aiohttp.server").error("bad %s", "header")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    error, warning = lines(capsys)
    assert (error["event"], error["level"], error["logger"]) == ("bad header", "error", "aiohttp.server")
    assert (warning["logger"], warning["worker"]) == ("py.warnings", "decode-1")
    assert "old" in warning["event"]


def test_lines_below_the_level_are_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    """The level holds for both kinds of loggers."""
    configure(LogConfig(format="json", level="warning"))
    structlog.get_logger().info("no")
    logging.getLogger("x").info("no")
    structlog.get_logger().warning("yes")
    assert [line["event"] for line in lines(capsys)] == ["yes"]


def test_configuring_again_replaces(capsys: pytest.CaptureFixture[str]) -> None:
    """No doubled lines, and no field of the earlier life."""
    configure(LogConfig(format="json"), worker="a")
    configure(LogConfig(format="json"), epoch=2)
    structlog.get_logger().info("once")
    (line,) = lines(capsys)
    assert "worker" not in line
    assert line["epoch"] == 2


@pytest.mark.parametrize("form", ["json", "console"])
def test_tracebacks_show_no_variables(capsys: pytest.CaptureFixture[str], form: Any) -> None:
    """Prompts live in the variables of the frames that fail: a traceback names lines of code only."""
    configure(LogConfig(format=form))

    def fail(prompt: str) -> None:
        raise RuntimeError(f"failed after {len(prompt)} characters")

    try:
        fail("my " + "secret")
    except RuntimeError:
        structlog.get_logger().exception("step failed")
        logging.getLogger("x").exception("again")
    text = capsys.readouterr().err
    assert text.count("failed after 9 characters") == 2
    assert text.count("Traceback") == 2
    assert "my secret" not in text


@pytest.mark.parametrize(("is_terminal", "is_json"), [(True, False), (False, True)])
def test_auto_is_console_on_a_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_terminal: bool, is_json: bool
) -> None:
    """``auto`` writes for whoever reads stderr: a person or a program."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    configure(LogConfig(format="auto"))
    structlog.get_logger().info("ready", port=1)
    assert capsys.readouterr().err.startswith("{") is is_json


def test_values_that_json_lacks_do_not_lose_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes, sets and exceptions as fields are shown by their repr rather than breaking the log."""
    configure(LogConfig(format="json"))
    structlog.get_logger().info("odd", digest=b"\x00", names={"a"}, error=ValueError("v"))
    (line,) = lines(capsys)
    assert "v" in str(line["error"])
    assert line["names"]
