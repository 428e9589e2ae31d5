"""The compiled kernels stay within the memory they are given: the same sources, under AddressSanitizer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("native_memory.cpp")
FLAGS = ["-std=c++20", "-O1", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-pthread", "-w", "-fsanitize=address"]


@pytest.mark.slow
def test_the_kernels_read_and_write_only_what_is_theirs(tmp_path: Path) -> None:
    """Products and attention, with whatever instructions this processor has; and their results are right."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    program = tmp_path / "native_memory"
    built = subprocess.run([compiler, *FLAGS, str(DRIVER), "-o", str(program)], capture_output=True, text=True, check=False)
    if built.returncode != 0 and "asan" in built.stderr:
        pytest.skip("needs the compiler's AddressSanitizer")
    assert built.returncode == 0, built.stderr[-2000:]
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=300)
    if ran.returncode == 77:
        pytest.skip("the operating system denies this process some registers")
    assert ran.returncode == 0, ran.stdout + ran.stderr[:4000]
