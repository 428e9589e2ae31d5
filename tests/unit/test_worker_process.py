"""What a worker process makes of its settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.model import ModelFiles, find_model
from disagg.worker_process import _compiler


def test_a_vocabulary_that_cannot_be_read_stops_no_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It serves what needs no grammar, and the log says why."""
    assert _compiler(ModelFiles("hf", tmp_path, "broken"), 100) is None
    assert "requests with a grammar will be refused" in capsys.readouterr().out
    assert _compiler(find_model("null"), 100) is not None
