"""The decoder of the Llama family (Llama, Mistral, Qwen2, Qwen3), for inference over a paged KV pool.

Shapes in comments: T tokens of the step, C hidden size, H heads, K key-value heads, D head size, I MLP size, V vocabulary.
Weights that read the same input are one matrix (q, k, v; gate, up). Positions turn pairs of neighbouring dimensions
(``disagg.kernels.rope``); rows of q and k from checkpoints that pair halves are reordered once, here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from disagg.engine.base import Progress
from disagg.kernels.linear import Linear, linear
from disagg.kernels.paged import Plan, Work, attention, make_plan, plan_order, write_kv
from disagg.kernels.rope import rms_norm, rope_, rope_table
from disagg.model import DividedScaling, LinearScaling, Llama3Scaling, ModelSpec, YarnScaling


class Weights(Protocol):
    """A checkpoint, read tensor by tensor under Hugging Face's names."""

    pairs_neighbours: bool
    """Whether rows of q and k are already in the order that turns neighbouring dimensions."""

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor, in the checkpoint's type or float32. Raises UnsupportedModelError when its shape is another."""
        ...


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model under Hugging Face's names: what a checkpoint must hold, and all it may hold."""
    c, d, i = spec.hidden_size, spec.head_dim, spec.intermediate_size
    q, kv = spec.num_heads * d, spec.num_kv_heads * d
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (c,),
        "self_attn.q_proj.weight": (q, c),
        "self_attn.k_proj.weight": (kv, c),
        "self_attn.v_proj.weight": (kv, c),
        "self_attn.o_proj.weight": (c, q),
        "post_attention_layernorm.weight": (c,),
        "mlp.gate_proj.weight": (i, c),
        "mlp.up_proj.weight": (i, c),
        "mlp.down_proj.weight": (c, i),
    }
    if spec.qkv_bias:
        layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if spec.qk_norm:
        layer |= {"self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, c), "model.norm.weight": (c,)}
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, c)
    for index in range(spec.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Tensor  # [C]
    qkv: Linear  # C → (H + 2K) D
    qk_norm: Tensor | None  # [H + K, D]: q's for each head, then k's
    output: Linear  # H D → C
    mlp_norm: Tensor  # [C]
    gate_up: Linear  # C → 2 I
    down: Linear  # I → C


class Llama:
    """The weights of one model on one device."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, *, dtype: torch.dtype, device: torch.device, progress: Progress
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        shapes = tensor_shapes(spec)

        def read(name: str) -> Tensor:
            return weights.read(name, shapes[name]).to(device=device, dtype=dtype)

        self._embedding = read("model.embed_tokens.weight")  # [V, C]
        self._layers = []
        for index in range(spec.num_layers):
            progress(index / (spec.num_layers + 1), f"layer {index + 1} of {spec.num_layers}")
            self._layers.append(self._read_layer(f"model.layers.{index}.", read, weights.pairs_neighbours))
        progress(spec.num_layers / (spec.num_layers + 1), "output head")
        self._norm = read("model.norm.weight")
        self._head = linear(self._embedding if spec.tie_word_embeddings else read("lm_head.weight"))  # C → V
        frequencies, scale = rope_frequencies(spec)
        self._turns = rope_table(frequencies.to(device), spec.max_position, scale)
        progress(1.0, "loaded")

    def _read_layer(self, prefix: str, read_full: Callable[[str], Tensor], pairs_neighbours: bool) -> Layer:
        spec = self.spec

        def read(name: str) -> Tensor:
            return read_full(prefix + name)

        def read_turned(name: str) -> Tensor:
            tensor = read(name)
            return tensor if pairs_neighbours else _pair_neighbours(tensor, spec.head_dim)

        def fused(suffix: str) -> Tensor:
            q, k = (read_turned(f"self_attn.{name}_proj.{suffix}") for name in ("q", "k"))
            return torch.cat((q, k, read(f"self_attn.v_proj.{suffix}")))

        qk_norm = None
        if spec.qk_norm:
            q, k = (read_turned(f"self_attn.{name}_norm.weight") for name in ("q", "k"))
            qk_norm = torch.cat((q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)))
        return Layer(
            attention_norm=read("input_layernorm.weight"),
            qkv=linear(fused("weight"), fused("bias") if spec.qkv_bias else None),
            qk_norm=qk_norm,
            output=linear(read("self_attn.o_proj.weight")),
            mlp_norm=read("post_attention_layernorm.weight"),
            gate_up=linear(torch.cat((read("mlp.gate_proj.weight"), read("mlp.up_proj.weight")))),
            down=linear(read("mlp.down_proj.weight")),
        )

    def forward(self, works: Sequence[Work], tokens: Sequence[int], pool: Tensor) -> Tensor:
        """The last layer's output [len(tokens), C] of ``tokens``, the works' one after another. Writes their KV."""
        parts = list(torch.split(torch.tensor(tokens, device=self.device), [work.num_tokens for work in works]))
        order = plan_order(works)
        plan = make_plan([works[index] for index in order], pool, self.spec.num_heads)
        hidden = self._hidden(torch.cat([parts[index] for index in order]), pool, plan)
        for index, part in zip(order, torch.split(hidden, [works[index].num_tokens for index in order])):
            parts[index] = part
        return torch.cat(parts)

    def _hidden(self, tokens: Tensor, pool: Tensor, plan: Plan) -> Tensor:
        """[T, C] for ``tokens`` [T], in the plan's order."""
        spec = self.spec
        num_turned = spec.num_heads + spec.num_kv_heads
        x = self._embedding.index_select(0, tokens)  # [T, C]
        turns = self._turns.index_select(0, plan.positions)  # [T, D / 2]
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(rms_norm(x, layer.attention_norm, spec.rms_norm_eps))
            qkv = qkv.view(len(tokens), num_turned + spec.num_kv_heads, spec.head_dim)  # [T, H + 2K, D]
            if layer.qk_norm is not None:
                normed = F.rms_norm(qkv[:, :num_turned], (spec.head_dim,), None, spec.rms_norm_eps) * layer.qk_norm
                qkv[:, :num_turned] = normed
            rope_(qkv[:, :num_turned], turns)
            write_kv(pool, index, qkv[:, spec.num_heads :], plan)
            attended = attention(qkv[:, : spec.num_heads], pool, index, plan)  # [T, H, D]
            x = layer.output.add_to(x, attended.view(len(tokens), -1))
            gate, up = layer.gate_up(rms_norm(x, layer.mlp_norm, spec.rms_norm_eps)).chunk(2, dim=-1)
            x = layer.down.add_to(x, F.silu(gate).mul_(up))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, V] from ``hidden`` [rows, C]."""
        logits: Tensor = self._head(rms_norm(hidden, self._norm, self.spec.rms_norm_eps))
        return logits.to(torch.float32)


def _pair_neighbours(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows ordered (i, i + D/2 apart) within each head → (2i, 2i + 1 together)."""
    return tensor.view(-1, 2, head_dim // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def rope_frequencies(spec: ModelSpec) -> tuple[Tensor, float]:
    """Radians per position of each pair, float32 [D / 2], and the factor on cos and sin."""
    frequencies: Tensor = 1.0 / spec.rope_theta ** (torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim)
    match spec.rope_scaling:
        case None:
            return frequencies, 1.0
        case LinearScaling(factor):
            return frequencies / factor, 1.0
        case DividedScaling(divisors):
            return frequencies / torch.tensor(divisors), 1.0
        case Llama3Scaling() as scaling:
            # How many turns a pair makes over the original context decides: few = stretched, many = kept.
            turns = scaling.original_max_position * frequencies / (2 * math.pi)
            kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            return _blend(frequencies, scaling.factor, kept.clamp(0, 1)), 1.0
        case YarnScaling() as scaling:
            low, high = (_yarn_pair(spec, scaling, beta) for beta in (scaling.beta_fast, scaling.beta_slow))
            if scaling.truncate:
                low, high = float(math.floor(low)), float(math.ceil(high))
            low, high = max(low, 0.0), min(high, spec.head_dim - 1.0)
            ramp = (torch.arange(spec.head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
            scale = scaling.attention_factor or 0.1 * math.log(max(scaling.factor, 1.0)) + 1.0
            return _blend(frequencies, scaling.factor, 1 - ramp.clamp(0, 1)), scale


def _blend(frequencies: Tensor, factor: float, kept: Tensor) -> Tensor:
    return frequencies * kept + frequencies / factor * (1 - kept)


def _yarn_pair(spec: ModelSpec, scaling: YarnScaling, num_turns: float) -> float:
    """The (fractional) pair that makes ``num_turns`` turns over the original context."""
    wavelength = scaling.original_max_position / (num_turns * 2 * math.pi)
    return spec.head_dim * math.log(wavelength) / (2 * math.log(spec.rope_theta))
