"""What the supervisor concludes from what workers say of themselves."""

from __future__ import annotations

from disagg.supervisor import LOST_S, Receipts


def test_a_worker_that_lacks_a_message_for_long_is_found_out() -> None:
    """The first Stats that lack it start the clock; two that come LOST_S later and still lack it are the proof."""
    receipts = Receipts()
    assert [receipts.lack_s(3, 4, now) for now in (10.0, 10.25, 10.0 + LOST_S)] == [None, None, None]
    assert receipts.lack_s(3, 5, 10.25 + LOST_S) == LOST_S + 0.25


def test_a_worker_in_a_long_step_is_not_taken_for_one_that_lost_a_message() -> None:
    """What it wrote before it looked proves nothing, however late it comes; what it takes starts the clock again."""
    receipts = Receipts()
    assert receipts.lack_s(3, 4, 10.0) is None
    assert receipts.lack_s(3, 9, 50.0) is None, "written at the end of a step of 40 s, before it looked"
    assert receipts.lack_s(7, 9, 90.0) is None, "it is slow, but it takes them"
    assert receipts.lack_s(9, 9, 130.0) is None
    assert receipts.lack_s(9, 10, 170.0) is None
    assert [receipts.lack_s(9, 10, 170.0 + LOST_S + index) for index in range(2)] == [None, LOST_S + 1]
