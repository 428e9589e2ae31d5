"""What holds for every test: hypothesis profiles, one torch thread, and no settings from the developer's own environment."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import HealthCheck, settings

# No deadline for one example: on a shared machine any of them can be starved for seconds.
settings.register_profile("dev", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), max_examples=200, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

for _variable in [name for name in os.environ if name.startswith("DISAGG_")]:
    del os.environ[_variable]


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """Where a test module has imported torch, it computes on one thread: same sums everywhere, and no fight for cores."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture
def anyio_backend() -> str:
    """Tests that are coroutines run on asyncio."""
    return "asyncio"
