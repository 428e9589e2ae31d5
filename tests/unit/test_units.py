"""The systemd files: systemd accepts them, their exposure is low, and ``install-unit`` fits them to a host."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from disagg import cli
from disagg.config import Config
from disagg.settings import load_config
from disagg.units import device_groups, unit_files

ROOT = Path(__file__).resolve().parents[2]
UNITS = {"cpu": "disagg-cpu.service", "gpu": "disagg.service"}
MOST_EXPOSED = {"cpu": 1.6, "gpu": 2.0}
NVIDIA = """Character devices:
  1 mem
195 nvidia
195 nvidiactl
195 nvidia
234 nvidia-uvm
510 nvidia-caps

Block devices:
  8 sd
"""

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze (Debian: systemd)")


def installed(device: str, command: str = "/bin/true", groups: tuple[str, ...] = (), sees_homes: bool = False) -> str:
    files = unit_files(device, command=[command], groups=groups, sees_homes=sees_homes)
    return files[f"etc/systemd/system/{UNITS[device]}"]


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", "--no-pager", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "LC_ALL": "C"})


@pytest.fixture(params=UNITS)
def unit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """One of the units, with a command that is there on any host."""
    path = tmp_path / UNITS[request.param]
    path.write_text(installed(request.param))
    return path


@needs_systemd
def test_systemd_has_nothing_to_say_against_a_unit(unit: Path) -> None:
    """``systemd-analyze verify`` is silent: no unknown directive, no wrong value."""
    result = analyze("verify", "--man=no", "--recursive-errors=no", str(unit))
    complaints = [line for line in (result.stdout + result.stderr).splitlines() if unit.name in line]
    assert complaints == []


@needs_systemd
def test_the_exposure_is_low(unit: Path) -> None:
    """``systemd-analyze security``: 0 is nothing exposed, 10 everything."""
    result = analyze("security", "--offline=true", str(unit))
    match = re.search(r"exposure level for \S+: ([0-9.]+)", result.stdout)
    assert match, result.stdout + result.stderr
    device = next(device for device, name in UNITS.items() if name == unit.name)
    assert float(match[1]) <= MOST_EXPOSED[device], result.stdout


@pytest.mark.parametrize("device", UNITS)
def test_a_unit_lets_ucx_find_its_network_cards(device: str) -> None:
    """Without netlink UCX sees none ("No such device"), so that no worker reaches another node: CPU workers need it as well."""
    families = re.search(r"^RestrictAddressFamilies=(.*)$", installed(device), re.MULTILINE)[1].split()
    assert families == ["AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"]


@pytest.mark.parametrize("device", UNITS)
def test_a_unit_gives_the_server_the_time_it_takes(device: str) -> None:
    """Killed later than a drain takes, ready when the server says so, and not restarted over wrong settings."""
    text = installed(device)
    stop_s = int(re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[1])
    assert stop_s > Config().server.drain_s + 10
    for line in ("Type=notify", "KillMode=mixed", "RestartPreventExitStatus=2", "LimitMEMLOCK=infinity", "LimitNOFILE=1048576"):
        assert f"\n{line}\n" in text


def test_a_unit_names_what_this_host_has() -> None:
    """The command of this installation, and exactly the GPU driver's device groups."""
    assert device_groups(NVIDIA) == ["nvidia", "nvidiactl", "nvidia-uvm", "nvidia-caps"]
    text = installed("gpu", "/srv/a b/50%/disagg", tuple(device_groups(NVIDIA)))
    assert '\nExecStart="/srv/a b/50%%/disagg" serve --config /etc/disagg/disagg.toml\n' in text
    allowed = re.findall(r"^DeviceAllow=char-(nvidia\S*) rw$", text, re.MULTILINE)
    assert allowed == ["nvidia", "nvidiactl", "nvidia-uvm", "nvidia-caps"]
    assert "\nDeviceAllow=char-nvidia* rw\n" in installed("gpu")
    assert device_groups("Character devices:\n  1 mem\n\nBlock devices:\n259 nvidia-disk\n") == []


def test_an_installation_in_a_home_can_be_seen() -> None:
    """ProtectHome=yes would hide the command itself; read-only is the least that works."""
    assert "\nProtectHome=yes\n" in installed("cpu")
    assert "\nProtectHome=read-only\n" in installed("cpu", sees_homes=True)


def test_install_unit_writes_a_service_and_says_what_is_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unit, user, directories, configuration below --dir; a configuration that is there stays; --dry-run writes nothing."""
    assert cli.main(["install-unit", "--cpu", "--dir", str(tmp_path), "--dry-run"]) == 0
    assert "[Service]" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    settings = tmp_path / "etc/disagg/disagg.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text("# mine")
    assert cli.main(["install-unit", "--cpu", "--dir", str(tmp_path)]) == 0
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {
        "etc/systemd/system/disagg-cpu.service",
        "etc/sysusers.d/disagg.conf",
        "etc/tmpfiles.d/disagg.conf",
        "etc/disagg/disagg.toml",
    }
    assert settings.read_text() == "# mine"
    out = capsys.readouterr().out
    assert "systemctl enable --now disagg-cpu" in out
    assert "stays as it is" in out


def test_what_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file in the way of a directory: exit code 1 and the path."""
    (tmp_path / "etc").write_text("")
    assert cli.main(["install-unit", "--cpu", "--dir", str(tmp_path)]) == 1
    assert f"cannot write {tmp_path}/etc/systemd/system" in capsys.readouterr().err


def test_the_example_configuration_is_one() -> None:
    """Every setting in it exists, and what it sets is what the unit's comments rely on."""
    config, _ = load_config(ROOT / "systemd" / "disagg.toml", {}, {})
    assert config.server == Config().server
