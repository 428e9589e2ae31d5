"""What rounding costs: of activations to bytes, and of weights that are quantised when they are loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
import transformers
from disagg.kernels.native import best_library
from gguf import quants

from disagg.engine.base import Chunk
from disagg.model import find_model
from disagg.text.tokenizer import load_tokenizer
from tests.golden.conftest import BUILT_IN, Case, Rig, prompt

TEXTS = [Path(__file__).parents[2] / name for name in ("LICENSE", "docs/handoff.md", "docs/operation.md")]

pytestmark = pytest.mark.skipif(best_library() is None, reason="the kernels were not built: needs a C++ compiler")


def surprise(logits: torch.Tensor, tokens: list[int]) -> float:
    """The mean -log p of each token after the first, given the logits [tokens, vocab] at the one before."""
    return torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(tokens[1:])).item()


def test_perplexity_is_within_half_a_percent_of_transformers(cases: Callable[[str], Case]) -> None:
    """Of 3,000 tokens of text, with activations as bytes and KV in float16, against transformers on the same dequantised weights
    in float32."""
    case = cases(BUILT_IN)
    tokenizer, rig = load_tokenizer(case.files), Rig(case.files, activations="int8", kv_dtype="float16", num_tokens=4096)
    differences = []
    for text in TEXTS:
        tokens = tokenizer.encode(text.read_text())[:1024]
        with torch.inference_mode():
            expected = surprise(case.reference(torch.tensor([tokens])).logits[0], tokens)
        differences.append(surprise(rig.all_logits(rig.sequence(tokens), 512), tokens) - expected)
    assert any(differences)
    assert abs(math.exp(sum(differences) / len(TEXTS)) - 1) < 0.005


def test_quantised_when_loaded_is_the_model_of_the_rounded_weights(tmp_path: Path) -> None:
    """With ``quantize = int8`` a folder of floats gives transformers' logits of weights that were rounded to Q8_0."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, vocab_size=300, initializer_range=0.3, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(tmp_path)
    tokens = prompt(300, 60)
    with torch.inference_mode():
        plain = model(torch.tensor([tokens])).logits[0]
        for parameter in model.parameters():
            if parameter.dim() == 2:
                kind = gguf.GGMLQuantizationType.Q8_0
                parameter.copy_(torch.from_numpy(quants.dequantize(quants.quantize(parameter.numpy(), kind), kind)))
        expected = model(torch.tensor([tokens])).logits[0]
    rig = Rig(find_model(str(tmp_path)), quantize="int8")
    found = rig.all_logits(rig.sequence(tokens), 60)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert (found - plain).abs().max() > 1e-3


def test_an_answer_computed_anew_is_the_same_bits(cases: Callable[[str], Case]) -> None:
    """As after a failover: prompt and answer in one chunk, or the prompt in chunks and the answer token by token."""
    case = cases(BUILT_IN)
    rig = Rig(case.files, activations="int8", kv_dtype="float16")
    tokens = prompt(49152, 120)
    sequences = [rig.sequence(tokens) for _ in range(2)]
    for sequence in sequences:
        sequence.num_prompt = 97
    first, again = sequences
    parts = [rig.engine.forward([Chunk(first, 0, 48)])[0], rig.engine.forward([Chunk(first, 48, 49)])[0]]
    parts += [rig.engine.forward([Chunk(first, position, 1)])[0] for position in range(97, 120)]
    assert torch.equal(torch.cat(parts), rig.engine.forward([Chunk(again, 0, 120)])[0])
