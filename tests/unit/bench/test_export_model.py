"""The exported folder is the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.export_model import export, read_weights
from disagg.model import find_model, read_model_spec
from disagg.text.tokenizer import load_tokenizer
from tests.golden.conftest import BUILT_IN, Rig, prompt
from tests.golden.test_weights import write_gguf


def test_rows_of_queries_are_put_into_the_folders_order(tmp_path: Path) -> None:
    """GGUF turns neighbouring rows together, Hugging Face's layout those half a head apart: in every head first the even rows."""
    values = write_gguf(tmp_path / "m.gguf", "F32")  # four heads of 16 rows
    files = find_model(str(tmp_path / "m.gguf"))
    weights = read_weights(files, read_model_spec(files))
    rows = [head + row for head in range(0, 64, 16) for row in (*range(0, 16, 2), *range(1, 16, 2))]
    stored = torch.from_numpy(values["blk.0.attn_q.weight"])
    assert torch.equal(weights["model.layers.0.self_attn.q_proj.weight"], stored[rows])
    assert torch.equal(weights["model.layers.0.self_attn.v_proj.weight"], torch.from_numpy(values["blk.0.attn_v.weight"]))


@pytest.mark.slow
def test_the_exported_built_in_model_answers_the_same(tmp_path: Path) -> None:
    """The folder gives the tokens of the GGUF file, for the same text with the same ids, and ends where that ends."""
    original = find_model(BUILT_IN)
    export(original, tmp_path / "exported")
    copy = find_model(str(tmp_path / "exported"))
    text = "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n"
    ids, answers = [], []
    for files in (original, copy):
        tokenizer, rig = load_tokenizer(files), Rig(files)
        ids.append((tokenizer.encode(text), tokenizer.eos_token_ids))
        answers.append(rig.generate([rig.sequence(prompt(40_000, 50), room=20)], 20))
    assert ids[0] == ids[1]
    assert answers[0] == answers[1]
