"""What the documentation says of the code is what the code says of itself."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from disagg.handoff.protocol import HANDOFF_TABLE, HandoffEvent, HandoffState
from disagg.request import REQUEST_TABLE
from disagg.settings import SETTINGS

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def states() -> ModuleType:
    spec = importlib.util.spec_from_file_location("states", DOCS / "states.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_are_those_of_the_tables(states: ModuleType) -> None:
    """``python docs/states.py`` would change nothing, and each table has its picture."""
    page = states.PAGE.read_text(encoding="utf-8")
    assert states.drawn(page) == page
    assert all(page.count(states.picture(*picture)) == 1 for picture in states.PICTURES.values())


@pytest.mark.parametrize("table", [REQUEST_TABLE, HANDOFF_TABLE], ids=["request", "handoff"])
def test_a_picture_has_every_move_of_its_table_and_no_other(states: ModuleType, table: dict) -> None:
    """Read back, the arrows are the table."""
    arrows = re.findall(r"    (\w+) --> (\w+): (.+)", states.picture(table, next(iter(table))))
    drawn = {(state, event, following) for state, following, events in arrows for event in events.split(" / ")}
    assert drawn == {(state, event, following) for state, moves in table.items() for event, following in moves.items()}


def test_a_changed_table_changes_the_picture(states: ModuleType) -> None:
    """A page that nobody drew again is noticed."""
    changed = {**HANDOFF_TABLE, HandoffState.PUSHING: {HandoffEvent.RELEASE: HandoffState.RELEASING}}
    assert states.picture(changed, HandoffState.OFFERED) != states.picture(HANDOFF_TABLE, HandoffState.OFFERED)


@pytest.mark.parametrize("name", ["handoff.md", "operation.md"])
def test_a_page_names_only_settings_that_exist(name: str) -> None:
    """Every ``section.name`` in code type is a setting, so that nobody looks for a limit under a name it had once."""
    page = (DOCS / name).read_text(encoding="utf-8")
    sections = {name.partition(".")[0] for name in SETTINGS}
    named = {name for name in re.findall(r"`(\w+\.\w+)`", page) if name.partition(".")[0] in sections}
    assert len(named) > 5
    assert named <= set(SETTINGS)
