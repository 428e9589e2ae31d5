"""Tiny random models of every supported kind, made here by transformers, and an engine around a poisoned, scattered pool."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from disagg.engine.base import Chunk, Sequence
from disagg.engine.load import load_engine
from disagg.engine.torch_engine import TorchEngine
from disagg.model import ModelFiles, find_model
from disagg.request import SamplingParams

_SMALL = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 300,
    "initializer_range": 0.3,  # large enough that logits differ by whole units: a wrong position or head shows at once
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}

CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**_SMALL),
    "llama-tied-llama3": lambda: transformers.LlamaConfig(
        **_SMALL,
        tie_word_embeddings=True,
        rope_parameters={**_LLAMA3, "original_max_position_embeddings": 64, "rope_theta": 500.0},
    ),
    "llama-linear-sharded": lambda: transformers.LlamaConfig(
        **{**_SMALL, "num_hidden_layers": 3}, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    ),
    "mistral": lambda: transformers.MistralConfig(**_SMALL, sliding_window=None, head_dim=16),
    "qwen2-yarn": lambda: transformers.Qwen2Config(**_SMALL, rope_parameters=_YARN),
    "qwen3-tied": lambda: transformers.Qwen3Config(**_SMALL, head_dim=16, tie_word_embeddings=True),
    "qwen3-mha": lambda: transformers.Qwen3Config(**{**_SMALL, "num_key_value_heads": 6}, head_dim=8),
}
BUILT_IN = "smollm2"
MODELS = [*CONFIGS, BUILT_IN]


@dataclass
class Case:
    name: str
    files: ModelFiles
    reference: transformers.PreTrainedModel


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """By name: the files of a model and transformers' own float32 version of it."""
    made: dict[str, Case] = {}

    def case(name: str) -> Case:
        if name not in made:
            made[name] = _built_in() if name == BUILT_IN else _tiny(name, tmp_path_factory.mktemp(name))
        return made[name]

    return case


def _tiny(name: str, folder: Path) -> Case:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).float().eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms and biases start as 1 and 0, which would hide a wrong one
            torch.nn.init.uniform_(parameter, 0.5, 1.5) if "norm" in parameter_name else torch.nn.init.normal_(parameter)
    model.save_pretrained(folder, max_shard_size="100KB" if "sharded" in name else "1GB")
    return Case(name, find_model(str(folder)), model)


def _built_in() -> Case:
    files = find_model(BUILT_IN)
    # What from_pretrained(gguf_file=…) does, without its requirement of the accelerate package.
    parsed = load_gguf_checkpoint(str(files.path))["config"]
    config = transformers.AutoConfig.for_model(parsed.pop("model_type"), **parsed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(files.path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied to the embedding
    return Case(BUILT_IN, files, model)


class Rig:
    """An engine over a pool of NaN, and sequences whose blocks lie in it in random order."""

    def __init__(
        self,
        files: ModelFiles,
        *,
        dtype: str = "float32",
        kv_dtype: str = "",
        block_size: int = 16,
        num_tokens: int = 2048,
        vocab_size: int = 1 << 30,
        activations: str = "float32",
        quantize: str = "none",
    ) -> None:
        engine = load_engine(
            files,
            dtype=dtype,
            kv_dtype=kv_dtype,
            block_size=block_size,
            vocab_size=vocab_size,
            device="cpu",
            progress=lambda fraction, what: None,
            quantize=quantize,
            activations=activations,
        )
        assert isinstance(engine, TorchEngine)
        self.engine = engine
        num_blocks = engine.layout.num_blocks(num_tokens)
        self.memory = bytearray(b"\xff" * (num_blocks * engine.layout.block_nbytes))  # 0xFFFF… is a NaN in every type
        engine.bind(memoryview(self.memory))
        self._free = list(range(num_blocks))
        random.Random(0).shuffle(self._free)
        self._next = 0

    def sequence(self, tokens: list[int], *, room: int = 0, **params: object) -> Sequence:
        """A greedy sequence with blocks for ``tokens`` and ``room`` more."""
        count = self.engine.layout.num_blocks(len(tokens) + room)
        blocks = [self._free.pop() for _ in range(count)]
        self._next += 1
        chosen = SamplingParams(**{"max_tokens": max(room, 1), "temperature": 0.0, **params})
        return Sequence(self._next, list(tokens), chosen, len(tokens), blocks=blocks)

    def all_logits(self, sequence: Sequence, chunk_tokens: int) -> torch.Tensor:
        """Logits at every position of the sequence, computed chunk by chunk."""
        rows = []
        for start in range(0, len(sequence.tokens), chunk_tokens):
            size = min(chunk_tokens, len(sequence.tokens) - start)
            rows.append(self.engine.logits(self.engine.forward([Chunk(sequence, start, size)])[0]))
        return torch.cat(rows)

    def generate(self, sequences: list[Sequence], num_tokens: int) -> list[list[int]]:
        """Prefill all in one step, then decode them together."""
        chunks = [Chunk(sequence, 0, len(sequence.tokens)) for sequence in sequences]
        for _ in range(num_tokens):
            for sequence, sample in zip(sequences, self.engine.step(chunks)):
                assert sample.token is not None
                sequence.tokens.append(sample.token)
            chunks = [Chunk(sequence, len(sequence.tokens) - 1, 1) for sequence in sequences]
        return [sequence.tokens[sequence.num_prompt :] for sequence in sequences]


def prompt(vocab_size: int, num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(2, vocab_size), k=num_tokens)
