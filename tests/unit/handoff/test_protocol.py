"""The two state tables: complete, closed, and safe by construction."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.errors import IllegalTransitionError
from disagg.handoff.protocol import HANDOFF_TABLE, HandoffEvent, HandoffState
from disagg.request import REQUEST_TABLE, RequestEvent, RequestState, advance

TABLES = [
    pytest.param(HANDOFF_TABLE, HandoffState, HandoffEvent, HandoffState.OFFERED, id="handoff"),
    pytest.param(REQUEST_TABLE, RequestState, RequestEvent, RequestState.QUEUED, id="request"),
]


@pytest.mark.parametrize(("table", "states", "events", "start"), TABLES)
def test_every_state_is_reachable_and_can_reach_an_end(
    table: Mapping[StrEnum, Mapping[StrEnum, StrEnum]], states: type[StrEnum], events: type[StrEnum], start: StrEnum
) -> None:
    """No state is left out of the table, none is an island, none is a trap."""
    assert set(table) == set(states)
    assert {event for moves in table.values() for event in moves} == set(events)

    def reach(state: StrEnum) -> set[StrEnum]:
        seen, todo = set(), [state]
        while todo:
            current = todo.pop()
            if current not in seen:
                seen.add(current)
                todo += table[current].values()
        return seen

    finals = {state for state, moves in table.items() if not moves}
    assert reach(start) == set(states)
    assert all(reach(state) & finals for state in states)


@given(st.lists(st.sampled_from(list(HandoffEvent)), max_size=12))
def test_blocks_are_never_released_while_a_writer_may_write(events: list[HandoffEvent]) -> None:
    """From PUSHING, only the writer's own word (pushed, quiesced) leads to a state from which blocks go back."""
    state, history = HandoffState.OFFERED, []
    for event in events:
        try:
            state = advance(HANDOFF_TABLE, state, event)
            history.append(event)
        except IllegalTransitionError:
            continue
    if state in (HandoffState.RELEASING, HandoffState.RELEASED) and HandoffEvent.PUSH in history:
        assert {HandoffEvent.PUSHED, HandoffEvent.QUIESCED} & set(history)


def test_an_illegal_move_names_the_state_and_the_event() -> None:
    """The error says what was tried, from where."""
    with pytest.raises(IllegalTransitionError, match="HandoffState pushing: no move for release"):
        advance(HANDOFF_TABLE, HandoffState.PUSHING, HandoffEvent.RELEASE)
