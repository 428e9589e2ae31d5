"""A second virtual environment with clients that people use, so that theirs and our dependencies need not agree.

It is made once for each ``requirements.txt`` (and Python), in the user's cache, and serves every later run.
``python -m tests.clients.environment`` makes it ahead of the tests and prints its interpreter.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
INSTALL_S = 900.0


class UnreachableError(Exception):
    """The package registry cannot be reached."""


def interpreter() -> Path:
    """The environment's interpreter; waits while another process makes it. Raises UnreachableError, CalledProcessError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "disagg"
    cache.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(REQUIREMENTS.read_bytes() + sys.version.encode()).hexdigest()[:16]
    folder = cache / f"clients-{key}"
    python, stamp = folder / "bin" / "python", folder / "complete"
    with (cache / "clients.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists():
            shutil.rmtree(folder, ignore_errors=True)
            venv.create(folder, with_pip=True)
            _install(python)
            stamp.touch()
    return python


def _install(python: Path) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--retries", "2", "--requirement", str(REQUIREMENTS)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if result.returncode != 0 and "connection broken by" in result.stderr:
        raise UnreachableError(result.stderr.strip().splitlines()[-1])
    if result.returncode != 0:
        sys.stderr.write(result.stderr)
        result.check_returncode()


if __name__ == "__main__":
    print(interpreter())
