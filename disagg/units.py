"""``disagg install-unit``: a systemd service for this host, from the files in ``systemd/``.

They work as they are for a server in /opt/disagg. What differs between hosts is put in here: where the command is, which device
groups the GPU driver has, and whether the installation lies in a home directory, which a service cannot see by default.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path

from disagg.errors import StartupError

_COMMAND = "/opt/disagg/.venv/bin/disagg"
_ANY_NVIDIA = "DeviceAllow=char-nvidia* rw\n"
_HOMES = ("/home", "/root", "/run/user")
_CONFIG = "etc/disagg/disagg.toml"


def run(*, device: str, root: Path, is_dry: bool) -> int:
    """Write (or print) the files below ``root`` and say what is next; 0. ``device``: cpu, gpu, or auto (gpu where there is one).

    A configuration that is there already stays as it is. Raises StartupError when something cannot be written.
    """
    groups = device_groups(Path("/proc/devices").read_text(encoding="utf-8"))
    if device == "auto":
        device = "gpu" if groups else "cpu"
    command, homes = _command(), _in_homes([sys.prefix, sys.base_prefix])
    files = unit_files(device, command=command, groups=groups, sees_homes=bool(homes))
    for name, text in files.items():
        path = root / name
        if is_dry:
            sys.stdout.write(f"# ---- {path}\n{text}\n")
        elif name == _CONFIG and path.exists():
            sys.stdout.write(f"{path} stays as it is\n")
        else:
            _write(path, text)
            sys.stdout.write(f"{path} written\n")
    if not is_dry:
        sys.stdout.write("\n".join(_next_steps(device, homes)) + "\n")
    return 0


def unit_files(device: str, *, command: Sequence[str], groups: Iterable[str], sees_homes: bool) -> Mapping[str, str]:
    """Path below / → content, for ``device`` cpu or gpu.

    ``command``: the words that start the command line, an absolute path first. ``groups``: the GPU driver's device groups; none =
    any that it may have.
    """
    unit = "disagg.service" if device == "gpu" else "disagg-cpu.service"
    text = _template(unit).replace(_COMMAND, " ".join(map(_escaped, command)))
    if allowed := "".join(f"DeviceAllow=char-{group} rw\n" for group in groups):
        text = text.replace(_ANY_NVIDIA, allowed)
    if sees_homes:
        text = text.replace("ProtectHome=yes\n", "ProtectHome=read-only\n")
    return {
        f"etc/systemd/system/{unit}": text,
        "etc/sysusers.d/disagg.conf": _template("sysusers.conf"),
        "etc/tmpfiles.d/disagg.conf": _template("tmpfiles.conf"),
        _CONFIG: _template("disagg.toml"),
    }


def device_groups(proc_devices: str) -> list[str]:
    """The NVIDIA driver's character devices in the text of /proc/devices, each group once."""
    characters = proc_devices.partition("Block devices:")[0]
    return list(dict.fromkeys(re.findall(r"^ *\d+ (nvidia\S*)$", characters, re.MULTILINE)))


def _command() -> list[str]:
    script = Path(sys.executable).with_name("disagg")
    return [str(script)] if script.exists() else [sys.executable, "-m", "disagg"]


def _in_homes(folders: Iterable[str]) -> list[str]:
    return [folder for folder in dict.fromkeys(folders) if folder.startswith(tuple(f"{home}/" for home in _HOMES))]


def _escaped(word: str) -> str:
    """As ExecStart= reads it: % begins a specifier, $ a variable, a space the next word."""
    word = word.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$").replace('"', '\\"')
    return f'"{word}"' if " " in word else word


def _template(name: str) -> str:
    return (resources.files("disagg") / "systemd" / name).read_text(encoding="utf-8")


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o644)
    except OSError as error:
        hint = " (run it as root)" if os.geteuid() else ""
        raise StartupError(f"cannot write {path}: {error.strerror}{hint}") from error


def _next_steps(device: str, homes: list[str]) -> Iterable[str]:
    unit = "disagg" if device == "gpu" else "disagg-cpu"
    if homes:
        yield f"\nMind: the user disagg must be able to read {' and '.join(homes)}; an installation in /opt needs no such care."
    yield "\nNext, as root:"
    yield "  systemd-sysusers && systemd-tmpfiles --create       # the user, /etc/disagg"
    yield '  echo "me:$(openssl rand -hex 32)" >> /etc/disagg/api-keys   # keys for clients; needed off 127.0.0.1'
    yield f"  editor /{_CONFIG}                       # which model, which port"
    yield f"  systemctl daemon-reload && systemctl enable --now {unit}"
    yield f"  journalctl -fu {unit}"
