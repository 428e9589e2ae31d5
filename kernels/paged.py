"""Attention over the paged KV pool ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``.

A ``Plan`` holds the index tensors of one step; it is built once and serves every layer, because the row numbers of layer
``l`` are those of layer 0 in a view that starts ``l`` layers later. Slots that nobody wrote may hold NaN, and no result may
depend on them: keys beyond a sequence's end get their scores replaced, values beyond it are not read at all.

Prefill: each chunk's keys and values are gathered to ``[num_kv_heads, tokens, head_dim]`` and attended in tiles of queries, so
that the scores of a tile stay in the L2 cache and nothing above the diagonal but a tile's corner is computed. Decode: keys
are gathered for a group of sequences; values are summed from where they lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from disagg.kernels.linear import product
from torch import Tensor

TILE = 64
"""Queries of one prefill tile. 64 measured best of 32, 64, 128 (1 MiB of L2, head_dim 64, three queries for each KV head)."""

GROUP_TOKENS = 4096
"""Padded tokens of one decode group: bounds the copy of the keys (3 MiB for 3 KV heads of 64) and the padding. Best measured
of 1024 to 16384: the copy stays in the cache until it is read, and a group is worth its calls."""


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part of a step: queries for positions ``start … start + num_tokens - 1``; ``blocks`` cover them all.

    ``is_prompt``: else they are the answer's. The compiled kernels may compute a prompt's in another way.
    """

    blocks: Sequence[int]
    start: int
    num_tokens: int
    is_prompt: bool = True


@dataclass(frozen=True, slots=True)
class PrefillPart:
    rows: slice  # of the step's tokens
    start: int
    pieces: Tensor  # [2 * num_kv_heads * blocks] rows of the pool seen as pieces of block_size * head_dim
    corner: Tensor  # [TILE, TILE] -inf above the diagonal, 0 elsewhere


@dataclass(frozen=True, slots=True)
class DecodePart:
    """A group of sequences padded to one length."""

    rows: slice
    pieces: Tensor  # [num_kv_heads * group * blocks] of the keys, as above
    beyond: Tensor  # bool [group, 1, length]: not this sequence's
    value_rows: Tensor  # [num_kv_heads * group * heads per KV head, length] rows of the pool seen as rows of head_dim


@dataclass(frozen=True, slots=True)
class Plan:
    """The index tensors of one step over ``num_tokens`` tokens."""

    num_tokens: int
    positions: Tensor  # [num_tokens]
    write_rows: Tensor  # [num_tokens * 2 * num_kv_heads] rows of head_dim
    prefill: list[PrefillPart]
    decode: list[DecodePart]


def plan_order(works: Sequence[Work]) -> list[int]:
    """The order in which ``make_plan`` wants them: chunks of several tokens, then single tokens from short to long."""
    return sorted(range(len(works)), key=lambda i: (works[i].num_tokens == 1, works[i].start if works[i].num_tokens == 1 else 0))


def make_plan(works: Sequence[Work], pool: Tensor, num_heads: int) -> Plan:
    """Index tensors for ``works``, which are in ``plan_order``."""
    _, num_layers, _, num_kv_heads, block_size, _ = pool.shape
    block_stride = num_layers * 2 * num_kv_heads  # pieces from one block to the next
    heads = np.arange(2 * num_kv_heads)
    positions = np.concatenate([np.arange(work.start, work.start + work.num_tokens) for work in works])
    write_blocks = np.concatenate(
        [np.asarray(work.blocks)[np.arange(work.start, work.start + work.num_tokens) // block_size] for work in works]
    )
    write_rows = (write_blocks[:, None] * block_stride + heads) * block_size + (positions % block_size)[:, None]

    prefill, row, index = [], 0, 0
    corner = torch.full((TILE, TILE), -math.inf, dtype=pool.dtype, device=pool.device).triu_(1)
    while index < len(works) and works[index].num_tokens > 1:
        work = works[index]
        blocks = np.asarray(work.blocks[: -(-(work.start + work.num_tokens) // block_size)])
        pieces = blocks * block_stride + heads[:, None]
        prefill.append(PrefillPart(slice(row, row + work.num_tokens), work.start, _tensor(pieces, pool), corner))
        row += work.num_tokens
        index += 1

    decode = []
    while index < len(works):
        end = index + 1
        while end < len(works) and (end + 1 - index) * (works[end].start + 1) <= GROUP_TOKENS:
            end += 1
        group = works[index:end]
        decode.append(_decode_part(group, slice(row, row + len(group)), pool, num_heads))
        row += len(group)
        index = end
    return Plan(row, _tensor(positions, pool), _tensor(write_rows, pool), prefill, decode)


def _decode_part(group: Sequence[Work], rows: slice, pool: Tensor, num_heads: int) -> DecodePart:
    _, num_layers, _, num_kv_heads, block_size, _ = pool.shape
    lengths = np.array([work.start + 1 for work in group])
    num_blocks = -(-int(lengths.max()) // block_size)
    table = np.empty((len(group), num_blocks), dtype=np.int64)
    for line, work in zip(table, group):
        count = min(num_blocks, len(work.blocks))
        line[:count] = work.blocks[:count]
        line[count:] = work.blocks[0]
    pieces = table * (num_layers * 2 * num_kv_heads) + np.arange(num_kv_heads)[:, None, None]  # [kv_heads, group, blocks]
    slots = pieces[..., None] * block_size + np.arange(block_size)
    slots = slots.reshape(num_kv_heads, len(group), -1)
    beyond = np.arange(slots.shape[-1]) >= lengths[:, None]
    slots = np.where(beyond, slots[..., :1], slots)  # weight 0 times a slot that was written, never times a NaN
    slots = np.repeat(slots[:, :, None], num_heads // num_kv_heads, axis=2).reshape(-1, slots.shape[-1])
    return DecodePart(
        rows, _tensor(pieces, pool), torch.from_numpy(beyond[:, None]).to(pool.device), _tensor(slots, pool, flat=False)
    )


def _tensor(array: np.ndarray, pool: Tensor, *, flat: bool = True) -> Tensor:
    return torch.from_numpy(array.reshape(-1) if flat else array).to(pool.device)


def write_kv(pool: Tensor, layer: int, kv: Tensor, plan: Plan) -> None:
    """Store ``kv`` [tokens, 2 * num_kv_heads, head_dim] (keys, then values) of this step's tokens in their slots."""
    _layer_rows(pool, layer, pool.shape[-1]).index_copy_(0, plan.write_rows, kv.reshape(-1, pool.shape[-1]).to(pool.dtype))


def attention(q: Tensor, pool: Tensor, layer: int, plan: Plan) -> Tensor:
    """Causal attention of this step's queries [tokens, num_heads, head_dim] over all their sequences' slots; the same shape.

    The step's own keys and values are already in the pool.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    q = q * (1.0 / math.sqrt(q.shape[-1]))
    for prefill in plan.prefill:
        prefill_attention(out[prefill.rows], q[prefill.rows], pool, layer, prefill)
    for decode in plan.decode:
        decode_attention(out[decode.rows], q[decode.rows], pool, layer, decode)
    return out


def prefill_attention(out: Tensor, q: Tensor, pool: Tensor, layer: int, part: PrefillPart) -> None:
    """One chunk: ``q`` [tokens, num_heads, head_dim], scaled; the result goes to ``out``."""
    num_kv_heads, block_size, head_dim = pool.shape[3:]
    num_tokens, num_heads, _ = q.shape
    group = num_heads // num_kv_heads
    kv = _layer_rows(pool, layer, block_size * head_dim).index_select(0, part.pieces).to(q.dtype)
    kv = kv.view(2, num_kv_heads, -1, head_dim)
    q, out = q.view(num_tokens, num_kv_heads, group, head_dim), out.view(num_tokens, num_kv_heads, group, head_dim)
    for first in range(0, num_tokens, TILE):
        rows = slice(first, min(first + TILE, num_tokens))
        size, length = rows.stop - first, part.start + rows.stop
        for head in range(num_kv_heads):
            queries = q[rows, head].transpose(0, 1).reshape(group * size, head_dim)
            scores = product(queries, kv[0, head, :length])  # [group * size, length]
            scores.view(group, size, length)[..., length - size :] += part.corner[:size, :size]
            weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
            attended = product(weights, kv[1, head, :length].T)  # [group * size, head_dim]
            out[rows, head] = attended.view(group, size, head_dim).transpose(0, 1)


def decode_attention(out: Tensor, q: Tensor, pool: Tensor, layer: int, part: DecodePart) -> None:
    """One token of each sequence of a group: ``q`` [group, num_heads, head_dim], scaled; the result goes to ``out``."""
    num_kv_heads, block_size, head_dim = pool.shape[3:]
    size, num_heads, _ = q.shape
    group = num_heads // num_kv_heads
    keys = _layer_rows(pool, layer, block_size * head_dim).index_select(0, part.pieces)
    keys = keys.view(num_kv_heads * size, -1, head_dim).to(q.dtype)
    queries = q.view(size, num_kv_heads, group, head_dim).transpose(0, 1).reshape(-1, group, head_dim)
    scores = torch.bmm(queries, keys.transpose(1, 2)).view(num_kv_heads, size, group, -1)
    weights = torch.softmax(scores.masked_fill_(part.beyond, -math.inf), -1, dtype=torch.float32).to(pool.dtype)
    # A bag is a weighted sum of rows of a table: the values are read in place, once, without a copy.
    values = _layer_rows(pool, layer, head_dim)[num_kv_heads * block_size :]
    attended = F.embedding_bag(part.value_rows, values, mode="sum", per_sample_weights=weights.view(part.value_rows.shape))
    out.view(size, num_kv_heads, group, head_dim).copy_(attended.view(num_kv_heads, size, group, head_dim).transpose(0, 1))


def _layer_rows(pool: Tensor, layer: int, width: int) -> Tensor:
    """The pool as rows of ``width`` elements, from the first of ``layer`` on."""
    return pool.view(-1, width)[layer * pool.stride(1) // width :]
