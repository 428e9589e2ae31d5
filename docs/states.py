"""Draws the two state tables into ``handoff.md``, between its markers: ``python docs/states.py``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from disagg.handoff.protocol import HANDOFF_TABLE, HandoffState
from disagg.request import REQUEST_TABLE, RequestState

PAGE = Path(__file__).with_name("handoff.md")
PICTURES = {"request": (REQUEST_TABLE, RequestState.QUEUED), "handoff": (HANDOFF_TABLE, HandoffState.OFFERED)}
_PLACE = re.compile(r"(<!-- (\w+) states -->\n).*?(<!-- end -->)", re.DOTALL)


def picture(table: Mapping[StrEnum, Mapping[StrEnum, StrEnum]], start: StrEnum) -> str:
    """The table as a Mermaid state diagram: every move an arrow, events that lead to the same state on one."""
    lines = ["stateDiagram-v2", f"    [*] --> {start}"]
    for state, moves in table.items():
        events: dict[StrEnum, list[str]] = {}
        for event, following in moves.items():
            events.setdefault(following, []).append(event)
        lines += [f"    {state} --> {following}: {' / '.join(names)}" for following, names in events.items()]
        if not moves:
            lines.append(f"    {state} --> [*]")
    return "\n".join(lines)


def drawn(page: str) -> str:
    """``page`` with the pictures as the tables are now. Raises KeyError for a marker that names no table."""
    return _PLACE.sub(lambda place: f"{place[1]}```mermaid\n{picture(*PICTURES[place[2]])}\n```\n{place[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
