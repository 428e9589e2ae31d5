"""The judgement of growth: what theory allows passes, what grows faster does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.curves import Law, bends_up

XS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
positive = st.floats(0.01, 1000)
judged = st.sampled_from([Law.FLAT, Law.LINE, Law.PROPORTIONAL])


@given(judged, positive, st.lists(st.floats(0.98, 1.02), min_size=len(XS), max_size=len(XS)))
def test_a_flat_figure_passes_whatever_its_noise(law: Law, level: float, noise: list[float]) -> None:
    """A scatter of 2% is no growth, by any law."""
    assert bends_up(law, XS, [level * factor for factor in noise]) == []


@given(st.sampled_from([Law.LINE, Law.PROPORTIONAL]), positive, positive)
def test_a_line_passes_where_theory_has_one(law: Law, intercept: float, slope: float) -> None:
    """Whatever it begins at and however steep it is."""
    assert bends_up(law, XS, [intercept + slope * x for x in XS]) == []


@given(st.sampled_from([Law.LINE, Law.PROPORTIONAL]), positive, positive, st.sampled_from([0.3, 0.5, 0.9]))
def test_what_becomes_cheaper_passes(law: Law, intercept: float, slope: float, power: float) -> None:
    """Less than linear growth is never told where a line is allowed."""
    assert bends_up(law, XS, [intercept + slope * x**power for x in XS]) == []


@given(judged, positive)
def test_a_square_is_told(law: Law, slope: float) -> None:
    """Whatever the law."""
    assert 64.0 in bends_up(law, XS, [slope * (10 + x**2) for x in XS])


@given(st.floats(0.1, 10), positive)
def test_a_line_is_told_where_theory_has_a_flat(slope: float, level: float) -> None:
    """The cost grows with what it should not depend on."""
    assert 64.0 in bends_up(Law.FLAT, XS, [level * (1 + slope * x) for x in XS])


@given(st.sampled_from([Law.FLAT, Law.LINE]), positive, st.integers(3, 6))
def test_a_step_is_told_where_it_is(law: Law, level: float, index: int) -> None:
    """A flat figure that has doubled: from the very point on."""
    found = bends_up(law, XS, [level * (2 if place >= index else 1) for place in range(len(XS))])
    assert found[0] == XS[index]


@pytest.mark.parametrize(("law", "found"), [(Law.LINE, XS[3:]), (Law.PROPORTIONAL, []), (Law.OTHER, [])])
def test_flat_and_then_linear_is_proportional_or_less(law: Law, found: list[float]) -> None:
    """Streams cost nothing while something else is the limit: then no line from the begin, but none costs more than before."""
    assert bends_up(law, XS, [4.0, 4.0, 4.0, 8.0, 16.0, 32.0, 64.0]) == found
