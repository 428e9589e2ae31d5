"""The decoder of the Llama family by the compiled kernels: weights stay as small as they are stored, a step is one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import gguf
import torch
from gguf import quants
from torch import Tensor

from disagg.engine.base import Progress
from disagg.engine.llama import rope_frequencies, tensor_shapes
from disagg.kernels.native import MOST_DIM, MOST_GROUP, TYPES, Crew, Decoder, Layer, Matrix, best_library
from disagg.kernels.paged import Work
from disagg.kernels.rope import rope_table
from disagg.model import ModelSpec

_FLOATS = ("F32", "F16", "BF16")
_Q8_0_GROUP = 32


class Stored(NamedTuple):
    """A tensor as the file has it: of one of ``TYPES``, row by row at ``address``, which is valid while ``owner`` lives."""

    kind: str
    address: int
    owner: object


class StoredWeights(Protocol):
    """A checkpoint under Hugging Face's names, read as it is and as floats."""

    pairs_neighbours: bool

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor: ...

    def stored(self, name: str, shape: tuple[int, ...]) -> Stored: ...


class NativeLlama:
    """The weights of one model, on the CPU, computing in float32 with the threads of ``crew``."""

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(
        self, spec: ModelSpec, weights: StoredWeights, crew: Crew, *, quantize: bool, in_bytes: bool, progress: Progress
    ) -> None:
        """``quantize``: matrices that are stored as floats become Q8_0. ``in_bytes``: activations are rounded to bytes where
        they meet quantised weights."""
        self.spec = spec
        reader = _Reader(spec, weights, crew, quantize)
        embedding = reader.matrix("model.embed_tokens.weight")
        layers = []
        for index in range(spec.num_layers):
            progress(index / (spec.num_layers + 1), f"layer {index + 1} of {spec.num_layers}")
            layers.append(reader.layer(f"model.layers.{index}."))
        frequencies, scale = rope_frequencies(spec)
        self._decoder = Decoder(
            crew,
            layers,
            embedding=embedding,
            head=embedding if spec.tie_word_embeddings else reader.matrix("lm_head.weight"),
            norm=reader.vector("model.norm.weight"),
            turns=rope_table(frequencies, spec.max_position, scale),
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            epsilon=spec.rms_norm_eps,
            in_bytes=in_bytes,
        )
        progress(1.0, "loaded")

    def forward(self, works: Sequence[Work], tokens: Sequence[int], pool: Tensor) -> Tensor:
        """The last layer's output [len(tokens), hidden_size] of ``tokens``, the works' one after another; writes their KV."""
        hidden: Tensor = self._decoder.forward(works, tokens, pool)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, V] from ``hidden`` [rows, C]."""
        logits: Tensor = self._decoder.logits(hidden)
        return logits


class _Reader:
    """Reads a checkpoint's tensors into what the kernels take. Rows of q and k come out with pairs as neighbours."""

    def __init__(self, spec: ModelSpec, weights: StoredWeights, crew: Crew, quantize: bool) -> None:
        self._spec, self._weights, self._crew, self._shapes = spec, weights, crew, tensor_shapes(spec)
        self._quantize = quantize
        self._order: dict[str, Tensor] = {} if weights.pairs_neighbours else _neighbours_first(spec)

    def layer(self, prefix: str) -> Layer:
        spec, (q, k, v) = self._spec, (f"{prefix}self_attn.{name}_proj." for name in "qkv")
        qk_norm: Tensor | None = None
        biases: Sequence[Tensor | None] = (None, None, None)
        if spec.qk_norm:
            qk_norm = torch.cat(
                [
                    self._turned("k", self.vector(f"{prefix}self_attn.{name}_norm.weight"), spec.head_dim).expand(count, -1)
                    for name, count in (("q", spec.num_heads), ("k", spec.num_kv_heads))
                ]
            )
        if spec.qkv_bias:
            biases = [self._turned(name, self.vector(which + "bias")) for name, which in zip("qkv", (q, k, v))]
        return Layer(
            attention_norm=self.vector(prefix + "input_layernorm.weight"),
            mlp_norm=self.vector(prefix + "post_attention_layernorm.weight"),
            qk_norm=qk_norm,
            q=self.matrix(q + "weight", self._order.get("q")),
            k=self.matrix(k + "weight", self._order.get("k")),
            v=self.matrix(v + "weight"),
            output=self.matrix(prefix + "self_attn.o_proj.weight"),
            gate=self.matrix(prefix + "mlp.gate_proj.weight"),
            up=self.matrix(prefix + "mlp.up_proj.weight"),
            down=self.matrix(prefix + "mlp.down_proj.weight"),
            q_bias=biases[0],
            k_bias=biases[1],
            v_bias=biases[2],
        )

    def vector(self, name: str) -> Tensor:
        """float32, contiguous"""
        return self._weights.read(name, self._shapes[name]).to(torch.float32).contiguous()

    def matrix(self, name: str, order: Tensor | None = None) -> Matrix:
        rows, cols = self._shapes[name]
        stored = self._weights.stored(name, (rows, cols))
        if self._quantize and stored.kind in _FLOATS and cols % _Q8_0_GROUP == 0:
            stored = _quantised(self._weights.read(name, (rows, cols)))
        return Matrix(self._crew, TYPES[stored.kind], stored.address, (rows, cols), order)

    def _turned(self, name: str, vector: Tensor, size: int | None = None) -> Tensor:
        order = self._order.get(name)
        return vector if order is None else vector[order[:size].long()]


def native_crew(spec: ModelSpec, num_threads: int) -> Crew | None:
    """The threads to compute ``spec`` with, None where the kernels were not built or cannot do it."""
    lib = best_library()
    fits = spec.head_dim <= MOST_DIM and spec.num_heads // spec.num_kv_heads <= MOST_GROUP
    return Crew(lib, num_threads) if lib is not None and fits else None


def _quantised(values: Tensor) -> Stored:
    """float [rows, cols] as Q8_0: for each 32 of a row a 16-bit float, the largest over 127, and 32 signed bytes."""
    blocks = quants.quantize(values.to(torch.float32).numpy(), gguf.GGMLQuantizationType.Q8_0)
    return Stored("Q8_0", blocks.ctypes.data, blocks)


def _neighbours_first(spec: ModelSpec) -> dict[str, Tensor]:
    """For q and k, the row of a checkpoint that pairs i with i + D/2 for each row where 2i and 2i + 1 are a pair."""
    half = torch.arange(spec.head_dim // 2)
    within = torch.stack((half, half + spec.head_dim // 2), dim=1).reshape(-1)
    return {
        name: (torch.arange(heads)[:, None] * spec.head_dim + within).reshape(-1).to(torch.int32)
        for name, heads in (("q", spec.num_heads), ("k", spec.num_kv_heads))
    }
