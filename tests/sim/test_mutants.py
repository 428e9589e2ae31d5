"""Is the simulation sharp? Every planted bug must be found, and by nothing but the bug."""

from __future__ import annotations

import random

import pytest

from tests.sim.mutants.catalogue import MUTANTS
from tests.sim.mutants.mutate import Mutant, planted
from tests.sim.schedules import draw
from tests.sim.shrink import failure_of

NUM_DRAWN = 100


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_found(mutant: Mutant) -> None:
    """By its own scene, or where the code has moved on, by one of those drawn; without the bug that scene is all right."""
    scenes = [mutant.schedule, *(draw(random.Random(seed)) for seed in range(NUM_DRAWN))]
    with planted(mutant):
        found = next((scene for scene in scenes if failure_of(scene)), None)
    assert found is not None, "the simulation does not notice; look for a scene with python -m tests.sim.explore --mutant"
    assert failure_of(found) is None
