"""A sitting: what its file may say, and that a server which was started leaves nothing behind."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from bench.peers import HERE, Server, expand, read_sitting, started
from bench.peers_report import FIGURES

SERVER = """
[[server]]
name = "some"
url = "http://127.0.0.1:1"
command = "true"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "peers.toml"
    path.write_text(text)
    return path


def is_running(pid: int) -> bool:
    """A zombie is not: whether an orphan is waited for is the business of the system's first process."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_projects_own_sitting_is_sound() -> None:
    """Every target of bench/peers.toml is a known figure, each name and address is used once, and a server of ours is there."""
    sitting = read_sitting(HERE / "peers.toml")
    assert {target.figure for target in sitting.target} <= FIGURES.keys()
    assert (
        len({server.name for server in sitting.server}) == len({server.url for server in sitting.server}) == len(sitting.server)
    )
    assert any(server.is_ours for server in sitting.server)


def test_a_target_that_names_no_server_is_refused(tmp_path: Path) -> None:
    """A misspelt opponent would otherwise be one that was never beaten."""
    target = '[[target]]\nfigure = "ready_s"\nours = "some"\nagainst = ["soem"]\nat_least = 1\n'
    with pytest.raises(ValueError, match="soem"):
        read_sitting(write(tmp_path, SERVER + target))


def test_an_unknown_setting_is_refused(tmp_path: Path) -> None:
    """As anywhere else: what is misspelt is not ignored."""
    with pytest.raises(msgspec.ValidationError, match="timeout"):
        read_sitting(write(tmp_path, SERVER + "timeout = 3\n[[target]]\n"))


def test_placeholders_are_filled_in_and_unknown_ones_refused() -> None:
    """Paths of the machine come from outside the file."""
    assert expand("$PEERS/bin/serve --model ${MODEL}x", {"PEERS": "/p", "MODEL": "m"}) == "/p/bin/serve --model mx"
    with pytest.raises(ValueError, match="OTHER"):
        expand("$OTHER", {})


def test_a_started_server_is_gone_with_all_its_descendants(tmp_path: Path) -> None:
    """Also those in sessions of their own that ignore SIGTERM once their parent has ended."""
    child = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    parent = (
        "import subprocess, sys, signal\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE, start_new_session=True)\n"
        "child.stdout.readline(); print(child.pid, flush=True); signal.pause()"
    )
    (tmp_path / "server.py").write_text(parent)
    log = tmp_path / "log"
    server = Server(name="some", url="", command="$PYTHON $SCRIPT")
    with started(server, {"PYTHON": sys.executable, "SCRIPT": str(tmp_path / "server.py")}, log, grace_s=0.2) as process:
        while not (told := log.read_text()).endswith("\n"):
            assert process.poll() is None
    assert process.poll() is not None
    assert not is_running(int(told))
