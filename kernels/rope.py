"""Rotary position embedding over interleaved pairs, and the RMS norm before it.

Dimensions ``2i`` and ``2i + 1`` of a head form one complex number that is turned by ``position * frequency[i]``: one in-place
complex product. Checkpoints that pair ``i`` with ``i + head_dim / 2`` have the rows of q and k reordered when they are loaded
(scores do not change, q and k being reordered alike).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rope_table(frequencies: Tensor, num_positions: int, scale: float = 1.0) -> Tensor:
    """``scale * exp(i position frequency)``: complex64 [num_positions, head_dim / 2] from float32 [head_dim / 2]."""
    positions = torch.arange(num_positions, dtype=torch.float32, device=frequencies.device)
    angles = torch.outer(positions, frequencies)
    return torch.polar(torch.full_like(angles, scale), angles)


def rope_(x: Tensor, turns: Tensor) -> None:
    """Turn ``x`` [tokens, heads, head_dim] in place by ``turns`` [tokens, head_dim / 2] (rows of the table)."""
    pairs = x.float().view(*x.shape[:-1], -1, 2)
    turned = torch.view_as_complex(pairs).mul_(turns[:, None])
    if x.dtype is not torch.float32:  # complex numbers have no 16-bit type: the product was made in a copy
        x.copy_(torch.view_as_real(turned).view(x.shape))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension."""
    return F.rms_norm(x, weight.shape, weight, eps)
