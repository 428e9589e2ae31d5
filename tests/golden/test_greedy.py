"""Whole generations against transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.golden.conftest import BUILT_IN, CONFIGS, Case, Rig, prompt

NUM_TOKENS = 64


def generate_by_transformers(case: Case, tokens: list[int]) -> list[int]:
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        out = case.reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return [int(token) for token in out[0, len(tokens) :]]


@pytest.mark.parametrize("name", [*CONFIGS, pytest.param(BUILT_IN, marks=pytest.mark.slow)])
def test_greedy_tokens_equal_transformers(cases: Callable[[str], Case], name: str) -> None:
    """64 greedy tokens are transformers', alone and in a batch of 8 prompts of different lengths."""
    case = cases(name)
    prompts = [prompt(case.reference.config.vocab_size, 5 + 9 * index, seed=index) for index in range(8)]
    rig = Rig(case.files)
    alone = rig.generate([rig.sequence(prompts[3], room=NUM_TOKENS)], NUM_TOKENS)[0]
    together = rig.generate([rig.sequence(tokens, room=NUM_TOKENS) for tokens in prompts], NUM_TOKENS)
    assert alone == together[3]
    checked = range(8) if name in ("llama", "qwen3-tied") else (3, 7)
    for index in checked:
        assert together[index] == generate_by_transformers(case, prompts[index])
