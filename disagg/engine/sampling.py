"""From logits to tokens: bias, penalties, grammar, temperature, min_p, top_k, top_p, one draw.

A draw is one number of a counter-based generator keyed by (seed, position), put through the inverse of the filtered
distribution's cumulative sum in token order. So a request draws the same tokens in any batch, in any chunking, after a
preemption and on another worker; and a filter that removes nothing changes nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from disagg.grammar import Mask
from disagg.messages import TokenLogprobs
from disagg.request import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures below it mean the best token: dividing by them would overflow."""

_DRAW_ROWS = 16
"""Rows drawn at once: bounds the float64 copies (6 MB a row group for a vocabulary of 50,000)."""

_TOP_P_GUESS = 1024
"""Candidates looked at before sorting the whole vocabulary for top_p: they nearly always hold the nucleus."""


@dataclass(frozen=True, slots=True)
class Row:
    """Whose logits a row is: they predict the token after ``tokens`` (prompt + generated)."""

    params: SamplingParams
    tokens: Sequence[int]
    num_prompt: int
    allowed: Mask | None = None  # by the request's grammar, which has seen to min_tokens too; None = all


def greatest(logits: Tensor) -> tuple[list[int], list[bool]]:
    """The best token of each row [rows, vocabulary], and whether its logit is finite: a NaN counts as the greatest."""
    values = logits.numpy() if logits.device.type == "cpu" else logits  # torch's own search takes five times as long there
    best = values.argmax(-1).tolist()
    return best, [math.isfinite(values[row, token]) for row, token in enumerate(best)]


def sample(logits: Tensor, rows: Sequence[Row], best: Sequence[int] | None = None) -> list[tuple[int, TokenLogprobs | None]]:
    """The next token of each row, and its log-probabilities where asked for.

    ``logits``: float32 [rows, vocabulary]. ``best``: what ``greatest`` said of them.
    """
    adjusted = _adjust(logits, rows)
    tokens = list(best) if best is not None and adjusted is logits else greatest(adjusted)[0]
    drawn = [index for index, row in enumerate(rows) if row.params.temperature >= GREEDY_BELOW]
    for first in range(0, len(drawn), _DRAW_ROWS):
        some = drawn[first : first + _DRAW_ROWS]
        for index, token in zip(some, _draw(adjusted[some], [rows[index] for index in some])):
            tokens[index] = token
    logprobs: list[TokenLogprobs | None] = [None] * len(rows)
    scored = [(index, row.params.num_logprobs) for index, row in enumerate(rows) if row.params.num_logprobs is not None]
    if scored:
        indices = [index for index, _ in scored]
        results = score(logits[indices], [tokens[index] for index in indices], [count for _, count in scored])
        for index, result in zip(indices, results):
            logprobs[index] = result
    return list(zip(tokens, logprobs))


def score(logits: Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of ``tokens`` (one a row) and each row's ``num_top`` best, from the unmodified ``logits``."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    values, ids = (part.tolist() for part in logprobs.topk(min(max(num_top), logprobs.shape[-1]), dim=-1))
    return [
        TokenLogprobs(logprob, list(zip(ids[row][:count], values[row][:count])))
        for row, (logprob, count) in enumerate(zip(chosen, num_top))
    ]


def uniform(seed: int, position: int) -> float:
    """In [0, 1): the number that (seed, position) always gives."""
    generator = np.random.Philox(key=seed % (1 << 64), counter=position)
    return (int(generator.random_raw()) >> 11) * 2.0**-53


def _adjust(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Bias, penalties and banned tokens. Returns ``logits`` itself when no row has any."""
    changed = [index for index, row in enumerate(rows) if _is_adjusted(row)]
    if not changed:
        return logits
    adjusted = logits.clone()
    for index in changed:
        _adjust_row(adjusted[index], rows[index])
    return adjusted


def _is_adjusted(row: Row) -> bool:
    p = row.params
    penalised = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
    is_limited = row.allowed is not None or len(row.tokens) - row.num_prompt < p.min_tokens
    return penalised or is_limited or bool(p.logit_bias)


def _adjust_row(logits: Tensor, row: Row) -> None:
    params, size = row.params, len(logits)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({token for token in row.tokens if token < size}), device=logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    output = [token for token in row.tokens[row.num_prompt :] if token < size]
    if output and (params.presence_penalty != 0.0 or params.frequency_penalty != 0.0):
        counts = Counter(output)
        ids = torch.tensor(list(counts), device=logits.device)
        penalties = [params.presence_penalty + params.frequency_penalty * count for count in counts.values()]
        logits[ids] -= torch.tensor(penalties, device=logits.device)
    if row.allowed is not None:
        logits.masked_fill_(torch.from_numpy(~row.allowed[:size]).to(logits.device), -math.inf)
    elif len(row.tokens) - row.num_prompt < params.min_tokens:
        logits[[token for token in params.stop_token_ids if token < size]] = -math.inf


def _draw(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    temperatures = torch.tensor([row.params.temperature for row in rows], device=logits.device)
    logits = logits / temperatures[:, None]
    best = logits.amax(dim=-1, keepdim=True)
    floors = torch.stack([_floor(line, row.params) for line, row in zip(logits, rows)])
    weights = (logits - best).double().exp_().masked_fill_(logits < floors[:, None], 0.0)
    cumulative = weights.cumsum(dim=-1)
    totals = cumulative[:, -1].tolist()
    # Rounding must not push a draw onto or past the total: no token would be found there.
    targets = [
        min(uniform(row.params.seed, len(row.tokens)) * total, math.nextafter(total, 0.0)) for row, total in zip(rows, totals)
    ]
    found = torch.searchsorted(cumulative, torch.tensor(targets, dtype=torch.float64, device=logits.device)[:, None], right=True)
    return [int(token) for token in found[:, 0]]


def _floor(logits: Tensor, params: SamplingParams) -> Tensor:
    """The least logit that min_p, top_k and top_p leave (0-d). Tokens equal to the last one kept stay with it."""
    floor = logits.new_tensor(-math.inf)
    if params.min_p > 0.0:
        floor = logits.max() + math.log(params.min_p)
    if 0 < params.top_k < len(logits):
        floor = torch.maximum(floor, logits.topk(params.top_k).values[-1])
    if params.top_p < 1.0:
        floor = torch.maximum(floor, _nucleus_floor(logits, floor, params.top_p))
    return floor


def _nucleus_floor(logits: Tensor, floor: Tensor, top_p: float) -> Tensor:
    """The last logit of the smallest set of best tokens whose share of what ``floor`` leaves reaches ``top_p``."""
    best = logits.max()
    total = (logits - best).double().exp_().masked_fill_(logits < floor, 0.0).sum()
    for count in (min(_TOP_P_GUESS, len(logits)), len(logits)):
        ordered = logits.topk(count).values
        reached = (ordered - best).double().exp_().cumsum(0) >= top_p * total
        if reached.any():
            return ordered[int(reached.int().argmax())]
    return floor  # top_p within rounding of 1
