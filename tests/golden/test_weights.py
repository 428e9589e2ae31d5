"""What the loaders read, and what they refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from disagg.engine.llama import tensor_shapes
from disagg.engine.weights_gguf import GgufWeights
from disagg.engine.weights_safetensors import SafetensorsWeights
from disagg.errors import ConfigError, UnsupportedModelError
from disagg.model import ModelFiles, ModelSpec, find_model, read_model_spec
from tests.golden.conftest import BUILT_IN, Case, Rig, prompt
from tests.golden.test_logits import assert_same_logits, reference_logits


def test_sharded_folder_has_several_files(cases: Callable[[str], Case]) -> None:
    """The sharded case really is sharded (else its golden test proves nothing)."""
    folder = cases("llama-linear-sharded").files.path
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert (folder / "model.safetensors.index.json").is_file()


def test_built_in_weights_equal_what_transformers_reads(cases: Callable[[str], Case]) -> None:
    """Dequantised tensors are bit-equal to transformers', apart from the order of q's and k's rows."""
    case = cases(BUILT_IN)
    spec = read_model_spec(case.files)
    weights = GgufWeights(case.files, spec, tensor_shapes(spec))
    expected = case.reference.state_dict()
    for name, shape in tensor_shapes(spec).items():
        if not name.startswith(("model.layers.0.", "model.layers.29.", "model.embed", "model.norm")):
            continue
        found = weights.read(name, shape)
        if "q_proj" in name or "k_proj" in name:
            found = found.view(-1, spec.head_dim // 2, 2, shape[1]).transpose(1, 2).reshape(shape)
        assert torch.equal(found, expected[name]), name


GGUF_TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


def write_gguf(
    path: Path, quantisation: str, *, architecture: str = "llama", extra: tuple[str, ...] = ()
) -> dict[str, np.ndarray]:
    """A one-layer GGUF file of random weights, and what its tensors hold in float32."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (100, 64),
        "output_norm.weight": (64,),
        "blk.0.attn_norm.weight": (64,),
        "blk.0.attn_q.weight": (64, 64),
        "blk.0.attn_k.weight": (32, 64),
        "blk.0.attn_v.weight": (32, 64),
        "blk.0.attn_output.weight": (64, 64),
        "blk.0.ffn_norm.weight": (64,),
        "blk.0.ffn_gate.weight": (96, 64),
        "blk.0.ffn_up.weight": (96, 64),
        "blk.0.ffn_down.weight": (64, 96),
        **dict.fromkeys(extra, (64,)),
    }
    values = {}
    for name, shape in shapes.items():
        data = rng.normal(size=shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType[quantisation if len(shape) == 2 else "F32"]
        stored = gguf.quants.quantize(data, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
        values[name] = gguf.quants.dequantize(stored, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.mark.parametrize("quantisation", GGUF_TYPES)
def test_gguf_types_are_read_exactly(tmp_path: Path, quantisation: str) -> None:
    """Every supported type comes back as exactly the float32 values that gguf's own reference gives."""
    values = write_gguf(tmp_path / "m.gguf", quantisation)
    files = find_model(str(tmp_path / "m.gguf"))
    spec = read_model_spec(files)
    weights = GgufWeights(files, spec, tensor_shapes(spec))
    shapes = tensor_shapes(spec)
    for name, gguf_name in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
        ("model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight"),
    ):
        np.testing.assert_array_equal(weights.read(name, shapes[name]).numpy(), values[gguf_name])
    rig = Rig(files, num_tokens=64)
    assert torch.isfinite(rig.all_logits(rig.sequence(prompt(100, 20)), 7)).all()


def test_gguf_tensor_without_a_use_is_refused(tmp_path: Path) -> None:
    """A tensor that the model's description has no place for is named, not ignored."""
    write_gguf(tmp_path / "m.gguf", "F32", extra=("blk.0.extra.weight",))
    files = find_model(str(tmp_path / "m.gguf"))
    spec = read_model_spec(files)
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.extra\.weight"):
        GgufWeights(files, spec, tensor_shapes(spec))


def test_gguf_qwen2_is_not_reordered(tmp_path: Path) -> None:
    """Only the llama architecture stores q and k for neighbouring pairs."""
    write_gguf(tmp_path / "q.gguf", "F32", architecture="qwen2")
    write_gguf(tmp_path / "l.gguf", "F32")
    orders = {}
    for name in ("q", "l"):
        files = find_model(str(tmp_path / f"{name}.gguf"))
        spec = read_model_spec(files)
        orders[name] = GgufWeights(files, spec, tensor_shapes(spec)).pairs_neighbours
    assert orders == {"q": False, "l": True}


@pytest.fixture
def folder(cases: Callable[[str], Case], tmp_path: Path) -> Path:
    """A copy of the tiny Llama's folder, to be damaged."""
    copy = tmp_path / "model"
    shutil.copytree(cases("llama").files.path, copy)
    return copy


def open_folder(folder: Path) -> tuple[ModelFiles, ModelSpec]:
    files = find_model(str(folder))
    return files, read_model_spec(files)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_missing_tensor_is_named(folder: Path) -> None:
    """A checkpoint without one of the model's tensors is refused with that tensor's name."""
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    files, spec = open_folder(folder)
    with pytest.raises(UnsupportedModelError, match=r"missing: \['model.layers.1.mlp.up_proj.weight'\]"):
        SafetensorsWeights(files, tensor_shapes(spec))


def test_unexpected_tensor_is_named(folder: Path) -> None:
    """A tensor that we would not use means a model that we do not know."""
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.o_proj.bias": torch.zeros(48)}))
    files, spec = open_folder(folder)
    with pytest.raises(UnsupportedModelError, match=r"without a use: \['model.layers.0.self_attn.o_proj.bias'\]"):
        SafetensorsWeights(files, tensor_shapes(spec))


def test_wrong_shape_is_refused(folder: Path) -> None:
    """A tensor of another shape than config.json implies is refused with both shapes."""
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(47)}))
    files, spec = open_folder(folder)
    with (
        SafetensorsWeights(files, tensor_shapes(spec)) as weights,
        pytest.raises(UnsupportedModelError, match=r"\(47,\).*\(48,\)"),
    ):
        weights.read("model.norm.weight", (48,))


def test_folder_without_weights_is_an_operators_error(folder: Path) -> None:
    """No weights file: a ConfigError that names the folder."""
    (folder / "model.safetensors").unlink()
    files, spec = open_folder(folder)
    with pytest.raises(ConfigError, match="weights cannot be read"):
        SafetensorsWeights(files, tensor_shapes(spec))


def test_broken_index_is_an_operators_error(folder: Path) -> None:
    """An index that is no JSON object of the known form: a ConfigError that names it."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": 3}))
    files, spec = open_folder(folder)
    with pytest.raises(ConfigError, match=r"index\.json"):
        SafetensorsWeights(files, tensor_shapes(spec))


def test_half_precision_checkpoint_is_widened(cases: Callable[[str], Case], folder: Path) -> None:
    """A checkpoint stored in bfloat16 runs in float32: the logits are those of the rounded weights."""
    rounded = {name: value.bfloat16() for name, value in load_file(folder / "model.safetensors").items()}
    save_file(rounded, folder / "model.safetensors")
    case = cases("llama")
    original = {name: value.clone() for name, value in case.reference.state_dict().items()}
    tokens = prompt(300, 40)
    try:
        case.reference.load_state_dict({name: value.float() for name, value in rounded.items()})
        expected = reference_logits(case, tokens)
    finally:
        case.reference.load_state_dict(original)
    rig = Rig(find_model(str(folder)))
    assert_same_logits(rig.all_logits(rig.sequence(tokens), 16), expected)
