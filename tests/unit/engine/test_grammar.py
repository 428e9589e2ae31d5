"""Grammars in the engines and the scheduler: masks on logits, the matcher of a sequence, and the end of an answer."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from disagg import grammar
from disagg.engine.base import Sample, Sequence
from disagg.engine.blocks import BlockPool
from disagg.engine.grammar import Grammars
from disagg.engine.sampling import Row, sample
from disagg.engine.scheduler import Scheduler
from disagg.errors import GrammarError
from disagg.grammar import Compiler
from disagg.model import find_model
from disagg.request import FinishReason, SamplingParams
from disagg.text.grammar_vocabulary import grammar_vocabulary
from disagg.text.tokenizer import load_tokenizer

VOCABULARY = grammar_vocabulary(load_tokenizer(find_model("null")))
COMPILER = Compiler(VOCABULARY)
(END,) = VOCABULARY.ends
SIZE = 40
LOGITS = torch.randn(SIZE, generator=torch.Generator().manual_seed(3)) * 2


def sequence(prompt: bytes, generated: bytes, pattern: str, **params: Any) -> Sequence:
    chosen = SamplingParams(**{"max_tokens": 50, "grammar": grammar.regex(pattern), "stop_token_ids": (END,), **params})
    return Sequence(1, [*prompt, *generated], chosen, len(prompt))


def allowed(grammars: Grammars, of: Sequence) -> str:
    mask = grammars.allowed(of)
    assert mask is not None
    return "".join("$" if token == END else chr(token) for token in np.flatnonzero(mask))


def test_the_prompt_is_no_part_of_the_answer() -> None:
    """Only what was generated is read, when the sequence is met in the middle of its answer too."""
    grammars = Grammars(COMPILER)
    assert allowed(grammars, sequence(b"ab", b"", "abc")) == "a"
    assert allowed(grammars, sequence(b"xyz", b"ab", "abc")) == "c"


def test_each_token_is_read_once() -> None:
    """Met, drawn, asked again: the matcher has read exactly what was generated, however often its mask was asked for."""
    grammars, one = Grammars(COMPILER), sequence(b"x", b"ab", "abcde")
    for char in "cde":
        assert allowed(grammars, one) == allowed(grammars, one) == char
        is_complete = grammars.read(one, ord(char))
        one.tokens.append(ord(char))
        assert one.matcher is not None
        assert one.matcher.num_read == one.num_generated
    assert is_complete


def test_without_a_grammar_everything_may_come() -> None:
    """No mask, no matcher, no end."""
    grammars, one = Grammars(COMPILER), sequence(b"x", b"", "a", grammar=None)
    assert grammars.allowed(one) is None
    assert not grammars.read(one, 5)
    assert one.matcher is None


def test_min_tokens_reach_the_matcher() -> None:
    """The end is kept out until as many tokens were generated."""
    grammars = Grammars(COMPILER)
    assert allowed(grammars, sequence(b"x", b"a", "a*", min_tokens=2)) == "a"
    assert allowed(grammars, sequence(b"x", b"aa", "a*", min_tokens=2)) == "a$"


def test_what_cannot_be_followed_raises() -> None:
    """An engine without grammars, and tokens that the grammar never allowed."""
    with pytest.raises(GrammarError):
        Grammars(None).allowed(sequence(b"x", b"", "a"))
    with pytest.raises(GrammarError):
        Grammars(COMPILER).allowed(sequence(b"x", b"z", "a"))


def test_what_other_answers_have_found_out_ends_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matchers of one grammar share a limit: an answer that keeps it alone goes on when others have used it up."""
    monkeypatch.setattr(grammar, "_MAX_LEXER_STATES", 400)
    compiler, pattern = Compiler(VOCABULARY), "[ab]*a[ab]{12}"
    rng = random.Random(7)
    texts = [bytes(rng.choice(b"ab") for _ in range(30)) for _ in range(20)]

    def share() -> None:
        for text in texts:
            matcher = compiler.matcher(grammar.regex(pattern), [END])
            for byte in text:
                matcher.allowed(may_stop=True)
                matcher.read([byte])

    with pytest.raises(GrammarError, match="too many states"):
        share()
    grammars = Grammars(compiler)
    for text in texts:
        one = sequence(b"x", b"", pattern)
        for byte in text:
            assert chr(byte) in allowed(grammars, one)
            assert not grammars.read(one, byte)
            one.tokens.append(byte)
        assert one.matcher is not None
        assert one.matcher.num_read == len(text)


@given(
    st.sets(st.integers(0, SIZE - 1), min_size=1),
    st.floats(0.0, 2.0),
    st.integers(0, 50),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
    st.integers(0, 2**63),
)
def test_only_allowed_tokens_are_drawn(
    ids: set[int], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """Whatever filters, bias and penalties want; and log-probabilities stay those of the model."""
    mask = np.zeros(SIZE + 3, np.bool_)  # a tokenizer may know more ids than the model
    mask[list(ids)] = True
    params = SamplingParams(
        max_tokens=9, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, num_logprobs=1, min_tokens=5,
        logit_bias={(min(ids) + 1) % SIZE: 100.0}, repetition_penalty=1.3, stop_token_ids=tuple(ids),
    )  # fmt: skip
    (token, logprobs), (free, _) = sample(
        torch.stack([LOGITS, LOGITS]), [Row(params, [1, 2], 1, mask), Row(replaced(params), [1, 2], 1)]
    )
    assert token in ids
    assert logprobs is not None
    assert logprobs.logprob == pytest.approx(float(torch.log_softmax(LOGITS, -1)[token]), abs=1e-5)
    assert free == int(LOGITS.argmax()), "the mask of one row is not another's"
    assert math.isfinite(logprobs.logprob)


def replaced(params: SamplingParams) -> SamplingParams:
    return SamplingParams(max_tokens=params.max_tokens, temperature=0.0)


def test_a_mask_that_allows_all_changes_no_draw() -> None:
    """The same numbers draw the same tokens with and without it."""
    rows = [Row(SamplingParams(max_tokens=9, temperature=1.0, seed=seed), [1], 1) for seed in range(200)]
    masked = [replace(row, allowed=np.ones(SIZE, np.bool_)) for row in rows]
    logits = LOGITS.expand(200, -1)
    assert sample(logits, rows) == sample(logits, masked)


@pytest.mark.parametrize(
    ("is_complete", "num_tokens", "expected"),
    [(True, 9, FinishReason.STOP), (True, 1, FinishReason.STOP), (False, 1, FinishReason.LENGTH), (False, 9, None)],
)
def test_a_complete_answer_ends_with_stop(is_complete: bool, num_tokens: int, expected: FinishReason | None) -> None:
    """At an ordinary token too, before min_tokens, and where the length would have ended it with the same token."""
    scheduler = Scheduler(BlockPool(8), block_size=4, chunk_tokens=16, max_num_seqs=4, prefix_cache=False)
    scheduler.add(sequence(b"abc", b"", "a", max_tokens=num_tokens, min_tokens=num_tokens))
    batch = scheduler.schedule()
    (progress,) = scheduler.commit(batch, [Sample(5, is_complete=is_complete)])
    assert progress.finish_reason is expected
