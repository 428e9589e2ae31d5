"""The compiled kernels: one library for each set of instructions, chosen at run time. Everything else is in pyproject.toml.

They are optional: without a C++ compiler the package installs without them, and computes with torch alone.
"""

from __future__ import annotations

import platform
from pathlib import Path

from setuptools import Extension, setup

SOURCE = Path("kernels/src")
AVX512 = ["-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512"]
VARIANTS = {
    "x86_64": {"avx2": ["-march=x86-64-v3"], "avx512": AVX512, "amx": [*AVX512, "-mamx-tile", "-mamx-int8", "-mamx-bf16"]},
    "aarch64": {"neon": ["-march=armv8.2-a+dotprod"]},
}

setup(
    ext_modules=[
        Extension(
            f"disagg.kernels._native_{variant}",
            [str(SOURCE / "native.cpp")],
            depends=[str(path) for path in SOURCE.glob("*.h")],
            extra_compile_args=["-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-pthread", *flags],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
        for variant, flags in VARIANTS.get(platform.machine(), {}).items()
    ]
)
