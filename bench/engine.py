"""The engine under test, alone: no server, no worker around it."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from disagg.engine.base import Engine
from disagg.engine.load import load_engine
from disagg.launcher import WORKER_ENVIRONMENT
from disagg.model import ModelFiles, ModelSpec, find_model, read_model_spec


def load(model: str, block_size: int) -> tuple[ModelFiles, ModelSpec, Engine]:
    """The model's files, its description and an engine like the server's by default, not bound to a pool yet."""
    files = find_model(model)
    spec = read_model_spec(files)
    engine = load_engine(
        files,
        dtype="float32",
        kv_dtype="float16",
        block_size=block_size,
        vocab_size=spec.vocab_size,
        device="cpu",
        progress=lambda fraction, what: None,
    )
    return files, spec, engine


def apart(run: Callable[..., Any], *arguments: object) -> Any:
    """``run`` in a process like a worker's: its libraries keep the number of threads and the settings that they began with."""
    os.environ.update(WORKER_ENVIRONMENT)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(run, *arguments).result()
