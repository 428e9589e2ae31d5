"""What several of these files need: an interpreter with real clients, and openai-python on the server of the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.clients.environment import UnreachableError, interpreter
from tests.process.harness import Server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs that interpreter is slow, because the first time on a machine it is."""
    for item in items:
        if "clients" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def clients() -> Path:
    """The interpreter of the environment of ``tests/clients/requirements.txt``; the first time it takes minutes to make."""
    try:
        return interpreter()
    except UnreachableError as error:
        pytest.skip(f"the package registry cannot be reached: {error}")


@pytest.fixture
def client(running: Server) -> Iterator[openai.OpenAI]:
    """``running`` is the file's own fixture: which server it asks."""
    with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as made:
        yield made
