"""The engine's logits against transformers', position by position."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from disagg.kernels.native import best_library

from disagg.engine.base import Chunk
from tests.golden.conftest import BUILT_IN, MODELS, Case, Rig, prompt

# float32 sums in another order: errors grow with the size of the terms, not of the result, so logits near 0 need an absolute
# bound. 1e-4 of the largest logit (10 to 30 here) is some 20 times what was measured, and far below any real mistake.
RTOL, ATOL_OF_LARGEST = 1e-4, 1e-4


def assert_same_logits(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=RTOL, atol=ATOL_OF_LARGEST * float(expected.abs().max()))


def reference_logits(case: Case, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = case.reference(torch.tensor([tokens])).logits[0]
    return logits


@pytest.fixture(params=["compiled kernels", "torch alone"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test here runs with the compiled kernels, and as where there was no compiler."""
    if request.param == "torch alone":
        monkeypatch.setattr("disagg.engine.load.native_crew", lambda spec, num_threads: None)
    elif best_library() is None:
        pytest.skip("the kernels were not built: needs a C++ compiler")
    return str(request.param)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers_at_every_position(cases: Callable[[str], Case], name: str) -> None:
    """Whole or in chunks of any size, from scattered blocks of a poisoned pool, every position's logits are transformers'."""
    case = cases(name)
    tokens = prompt(case.reference.config.vocab_size, 150)
    expected = reference_logits(case, tokens)
    rig = Rig(case.files)
    assert torch.isfinite(expected).all()
    for chunk_tokens in (150, 64, 37, 1) if name != BUILT_IN else (150, 37):
        assert_same_logits(rig.all_logits(rig.sequence(tokens), chunk_tokens), expected)


@pytest.mark.parametrize("block_size", [1, 7, 32])
def test_logits_do_not_depend_on_the_block_size(cases: Callable[[str], Case], block_size: int) -> None:
    """Any number of tokens per block gives transformers' logits."""
    case = cases("llama")
    tokens = prompt(300, 100, seed=1)
    rig = Rig(case.files, block_size=block_size)
    assert_same_logits(rig.all_logits(rig.sequence(tokens), 33), reference_logits(case, tokens))


@pytest.mark.parametrize("name", ["llama", "qwen3-tied", BUILT_IN])
def test_mixed_batch_gives_each_sequence_its_own_logits(cases: Callable[[str], Case], name: str) -> None:
    """Prefill chunks at different offsets and decode tokens of different lengths in one step do not disturb each other."""
    case = cases(name)
    vocab_size = case.reference.config.vocab_size
    rig = Rig(case.files)
    lengths_and_starts = [(40, 39), (90, 50), (1, 0), (130, 129), (70, 0), (17, 16), (33, 31)]
    batch, expected = [], []
    for seed, (length, start) in enumerate(lengths_and_starts):
        tokens = prompt(vocab_size, length, seed)
        sequence = rig.sequence(tokens)
        if start:
            rig.engine.forward([Chunk(sequence, 0, start)])
        batch.append(Chunk(sequence, start, length - start))
        expected.append(reference_logits(case, tokens)[start:])
    for hidden, logits in zip(rig.engine.forward(batch), expected):
        assert_same_logits(rig.engine.logits(hidden), logits)


def test_logits_after_a_long_prompt(cases: Callable[[str], Case]) -> None:
    """Far into a sequence, where attention has several segments, a chunk's and single tokens' logits are transformers'."""
    case = cases(BUILT_IN)
    tokens = prompt(case.reference.config.vocab_size, 1100)
    with torch.inference_mode():
        expected = case.reference(torch.tensor([tokens]), logits_to_keep=5).logits[0]
    rig = Rig(case.files)
    sequence = rig.sequence(tokens)
    for start, size in ((0, 500), (500, 597)):
        hidden = rig.engine.forward([Chunk(sequence, start, size)])[0]
    found = [rig.engine.logits(hidden[-2:])]
    found += [rig.engine.logits(rig.engine.forward([Chunk(sequence, position, 1)])[0]) for position in range(1097, 1100)]
    assert_same_logits(torch.cat(found), expected)


@pytest.mark.parametrize("name", MODELS)
def test_kv_in_float16_is_close_to_float32(cases: Callable[[str], Case], name: str) -> None:
    """With keys and values rounded to 11 bits the logits stay within 3 thousandths of their spread, in prefill and decode."""
    case = cases(name)
    tokens = prompt(case.reference.config.vocab_size, 150)
    expected = reference_logits(case, tokens)
    rig = Rig(case.files, kv_dtype="float16")
    found = torch.cat((rig.all_logits(rig.sequence(tokens), 64)[:-1], rig.all_logits(rig.sequence(tokens[:10]), 1)))
    expected = torch.cat((expected[:-1], expected[:10]))
    error = float((found - expected).square().mean().sqrt() / expected.std())
    assert 0 < error < 3e-3


@pytest.mark.parametrize("name", ["llama", "qwen2-yarn", "qwen3-tied"])
def test_bfloat16_is_close_to_float32(cases: Callable[[str], Case], name: str) -> None:
    """A model loaded in bfloat16 gives finite logits that stay near the float32 ones, in prefill and decode."""
    case = cases(name)
    tokens = prompt(300, 80)
    expected = reference_logits(case, tokens)
    rig = Rig(case.files, dtype="bfloat16")
    found = torch.cat((rig.all_logits(rig.sequence(tokens), 50)[:-1], rig.all_logits(rig.sequence(tokens[:10]), 1)))
    expected = torch.cat((expected[:-1], expected[:10]))
    assert torch.isfinite(found).all()
    # bfloat16 keeps 8 bits: a few percent of the logits' spread after two layers.
    assert float((found - expected).square().mean().sqrt() / expected.std()) < 0.1


def test_prompt_logprobs_are_transformers(cases: Callable[[str], Case]) -> None:
    """Scores of prompt tokens, gathered over several chunks, are the log-softmax of transformers' logits."""
    case = cases("llama")
    tokens = prompt(300, 60)
    expected = torch.log_softmax(reference_logits(case, tokens), -1)
    rig = Rig(case.files)
    sequence = rig.sequence(tokens, max_tokens=0, num_prompt_logprobs=3)
    scores = []
    for start in (0, 25, 50):
        sample = rig.engine.step([Chunk(sequence, start, min(25, 60 - start))])[0]
        assert sample.token is None
        assert sample.prompt_logprobs is not None
        scores += sample.prompt_logprobs
    assert len(scores) == 59
    for position, entry in enumerate(scores):
        assert entry.logprob == pytest.approx(float(expected[position, tokens[position + 1]]), abs=1e-3)
        assert [token for token, _ in entry.top] == expected[position].topk(3).indices.tolist()


def test_ids_beyond_the_tokenizer_are_never_sampled(cases: Callable[[str], Case]) -> None:
    """Rows that pad the model's vocabulary take part in nothing: neither tokens nor alternatives nor the probabilities' sum."""
    case = cases("llama")
    tokens = prompt(50, 30)
    expected = torch.log_softmax(reference_logits(case, tokens)[-1, :50], -1)
    rig = Rig(case.files, vocab_size=50)
    sample = rig.engine.step([Chunk(rig.sequence(tokens, num_logprobs=50), 0, 30)])[0]
    assert sample.token == int(expected.argmax())
    assert sample.logprobs is not None
    assert sorted(token for token, _ in sample.logprobs.top) == list(range(50))
    assert sample.logprobs.logprob == pytest.approx(float(expected.max()), abs=1e-3)
