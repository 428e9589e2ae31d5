"""What several of these files need: an interpreter with real clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.environment import UnreachableError, interpreter


@pytest.fixture(scope="session")
def clients() -> Path:
    """The interpreter of the environment of ``tests/clients/requirements.txt``; the first time it takes minutes to make."""
    try:
        return interpreter()
    except UnreachableError as error:
        pytest.skip(f"the package registry cannot be reached: {error}")
