"""``disagg drain``: where a server's admin socket is, and what the command says when nobody is there."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from disagg import cli
from disagg.drain import admin_socket

BOTH = {"RUNTIME_DIRECTORY": "/run/disagg:/run/more", "XDG_RUNTIME_DIR": "/run/user/7"}


def test_the_socket_is_where_only_its_user_can_look() -> None:
    """The service's own directory, else the user's with the port in the name, else none; a path and off are taken as they are."""
    assert admin_socket("auto", 8000, BOTH) == "/run/disagg/admin.sock"
    assert admin_socket("auto", 8000, {"XDG_RUNTIME_DIR": "/run/user/7"}) == "/run/user/7/disagg-8000.sock"
    assert admin_socket("auto", 8000, {}) == ""
    assert admin_socket("off", 8000, BOTH) == ""
    assert admin_socket("/a/b", 8000, BOTH) == "/a/b"


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "https://box.example", "nonsense", "http://127.0.0.1:99999"])
def test_a_server_that_is_not_here_is_one_line_and_2(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No socket of that server is known: the message says how to name one."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert cli.main(["drain", "--url", url]) == 2
    assert capsys.readouterr().err.startswith("disagg: error: ")


def test_a_socket_where_nobody_answers_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Left behind by a server that was killed."""
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert cli.main(["drain", "--socket", str(path)]) == 2
    assert f"no answer from {path}" in capsys.readouterr().err
