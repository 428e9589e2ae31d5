"""The states of one hand-over, as data. The router and both roles move their own copy by the events they see.

    OFFERED ──reserved──▶ RESERVED ──push──▶ PUSHING ──pushed──▶ PUSHED ──commit──▶ COMMITTED ──released──▶ RELEASED
       │ refused                │ release         │ quiesce            │ release           (decode has finished)
       ▼                        ▼                 ▼                    ▼
    RELEASED                RELEASING ◀──quiesced── QUIESCING      RELEASING ──released──▶ RELEASED

The rule behind the table: decode's blocks are given back only from states in which nobody can write them. PUSHING has no
``release``: a writer must first have quiesced, or be known to be dead (``quiesced`` is then its epitaph).

No I/O, no clock. Decode counts itself as PUSHING from the moment it has answered with its blocks, since from then on a
peer may write them; a Commit is its news of both ``pushed`` and ``commit``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class HandoffState(StrEnum):
    OFFERED = "offered"
    RESERVED = "reserved"
    PUSHING = "pushing"
    PUSHED = "pushed"
    COMMITTED = "committed"
    QUIESCING = "quiescing"
    RELEASING = "releasing"
    RELEASED = "released"


class HandoffEvent(StrEnum):
    RESERVED = "reserved"
    REFUSED = "refused"
    PUSH = "push"
    PUSHED = "pushed"
    COMMIT = "commit"
    QUIESCE = "quiesce"
    QUIESCED = "quiesced"
    RELEASE = "release"
    RELEASED = "released"


HANDOFF_TABLE: Mapping[HandoffState, Mapping[HandoffEvent, HandoffState]] = {
    HandoffState.OFFERED: {
        HandoffEvent.RESERVED: HandoffState.RESERVED,
        HandoffEvent.REFUSED: HandoffState.RELEASED,
        HandoffEvent.RELEASE: HandoffState.RELEASING,
    },
    HandoffState.RESERVED: {
        HandoffEvent.PUSH: HandoffState.PUSHING,
        HandoffEvent.RELEASE: HandoffState.RELEASING,
    },
    HandoffState.PUSHING: {
        HandoffEvent.PUSHED: HandoffState.PUSHED,
        HandoffEvent.QUIESCE: HandoffState.QUIESCING,
    },
    HandoffState.PUSHED: {
        HandoffEvent.COMMIT: HandoffState.COMMITTED,
        HandoffEvent.RELEASE: HandoffState.RELEASING,
    },
    HandoffState.COMMITTED: {
        HandoffEvent.RELEASE: HandoffState.RELEASING,
        HandoffEvent.RELEASED: HandoffState.RELEASED,
    },
    HandoffState.QUIESCING: {
        HandoffEvent.PUSHED: HandoffState.RELEASING,  # it had finished before the word to stop reached it
        HandoffEvent.QUIESCED: HandoffState.RELEASING,
    },
    HandoffState.RELEASING: {
        HandoffEvent.RESERVED: HandoffState.RELEASING,  # the answer crossed the release
        HandoffEvent.REFUSED: HandoffState.RELEASED,
        HandoffEvent.QUIESCED: HandoffState.RELEASING,
        HandoffEvent.RELEASED: HandoffState.RELEASED,
    },
    HandoffState.RELEASED: {},
}
