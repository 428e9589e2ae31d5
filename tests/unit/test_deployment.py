"""What is planned fits: contexts into pools, pools into the memory that is free, workers onto cores; all else is refused."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.config import Config, KVConfig, ModelConfig, WorkersConfig
from disagg.deployment import Deployment, in_role, plan
from disagg.errors import ConfigError, StartupError
from disagg.messages import Configure
from disagg.model import ModelFiles, find_model, kv_layout, read_model_spec
from disagg.supervisor import Role

FILES: ModelFiles = find_model("null")
SPEC = read_model_spec(FILES)
MIB = 1 << 20


def planned(config: Config, *, cpus: int = 2, free_nbytes: int = 1 << 34) -> Deployment:
    return plan(config, FILES, SPEC, vocab_size=259, run_id="r", cpus=[range(cpus)], free_nbytes=free_nbytes, is_part=False)


@given(nbytes=st.integers(4096, 4 * MIB), block_size=st.integers(1, 64))
def test_the_longest_sequence_fits_into_every_pool_with_a_block_to_grow_into(nbytes: int, block_size: int) -> None:
    """However small the pools: a request of full length needs nobody else's blocks, so it cannot wait for ever."""
    config = Config(kv=KVConfig(memory=f"{nbytes}B", block_size=block_size))
    layout = kv_layout(SPEC, "float32", block_size)
    try:
        deployment = planned(config)
    except StartupError:
        assert nbytes // layout.block_nbytes < 2, "a block for tokens and one to grow into would have fitted"
        return
    for worker in deployment.workers:
        num_blocks = worker.kv_nbytes // layout.block_nbytes
        assert worker.kv_nbytes <= nbytes
        assert layout.num_blocks(deployment.max_model_len) + 1 <= num_blocks
        assert worker.max_model_len == deployment.max_model_len


@pytest.mark.parametrize("wanted", [1000, 4096, 100_000])
def test_a_context_that_does_not_fit_is_refused_with_the_size_that_would_do(wanted: int) -> None:
    """The number in the message is enough, and a MiB less is not."""

    def config(memory: str) -> Config:
        return Config(model=ModelConfig(max_model_len=wanted), kv=KVConfig(memory=memory))

    with pytest.raises(StartupError) as caught:
        planned(config("4096B"))
    (needed,) = re.findall(r"set kv\.memory to (\d+)MiB or more", str(caught.value))
    assert planned(config(f"{needed}MiB")).max_model_len == wanted
    if int(needed) > 1:
        with pytest.raises(StartupError):
            planned(config(f"{int(needed) - 1}MiB"))


def test_a_pool_that_nobody_asked_for_is_kept_small_by_evicting() -> None:
    """Beyond 384 MiB only running sequences make an automatic pool grow. One whose size was asked for is for the cache, too."""
    files = find_model("smollm2")
    spec = read_model_spec(files)

    def pool(memory: str, free_nbytes: int) -> tuple[int, int]:
        config = Config(kv=KVConfig(memory=memory))
        (worker, _) = plan(
            config, files, spec, vocab_size=9, run_id="r", cpus=[range(2)], free_nbytes=free_nbytes, is_part=False
        ).workers
        return round(worker.kv_nbytes / MIB), round(worker.kv_ample_nbytes / MIB)

    assert pool("auto", 16 << 30) == (1024, 384)
    assert pool("auto", 2 << 30) == (256, 256)
    assert pool("2GiB", 16 << 30) == (2048, 2048)


def test_pools_that_are_not_there_are_refused_with_what_they_need_and_what_is_free() -> None:
    """All workers together: each pool alone would fit."""
    config = Config(kv=KVConfig(memory="1GiB"), workers=WorkersConfig(prefill=2, decode=2))
    assert len(planned(config, cpus=4, free_nbytes=4 << 30).workers) == 4
    with pytest.raises(StartupError, match=r"each of 4 workers needs 4\.0 GiB, 3\.0 GiB are free"):
        planned(config, cpus=4, free_nbytes=3 << 30)


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        (WorkersConfig(), [([0, 1], [2, 3]), ([2, 3], [0, 1])]),
        (WorkersConfig(lend_cpus=False), [([0, 1], []), ([2, 3], [])]),
        (WorkersConfig(pin_cpus=False), [([], []), ([], [])]),
        (WorkersConfig(mode="colocated"), [([0, 1, 2, 3], [])]),
    ],
    ids=["lent", "not lent", "not pinned", "colocated"],
)
def test_cores_are_given_and_lent_as_configured(workers: WorkersConfig, expected: list[tuple[list[int], list[int]]]) -> None:
    """Of four: (its own, those that it may use while they are idle) for each worker."""
    planned_cores = [(worker.cpus, worker.lent_cpus) for worker in planned(Config(workers=workers), cpus=4).workers]
    assert planned_cores == expected


def test_a_head_needs_no_worker_of_its_own() -> None:
    """All of them may be on its nodes; a server without nodes would have nobody to serve with."""
    config = Config(workers=WorkersConfig(prefill=0, decode=0))
    head = plan(config, FILES, SPEC, vocab_size=259, run_id="r", cpus=[range(2)], free_nbytes=1 << 34, is_part=True)
    assert (head.mode, head.workers) == ("disagg", [])
    with pytest.raises(ConfigError, match=r"workers\.decode = 0 and workers\.prefill = 0: nobody would do that"):
        planned(config)


def test_a_worker_in_another_role_is_as_if_it_had_been_planned_so() -> None:
    """Everything but its name and its cores, which it keeps."""

    def others(worker: Configure) -> Configure:
        return msgspec.structs.replace(worker, worker="", cpus=[], lent_cpus=[])

    prefill, decode = planned(Config()).workers
    assert others(in_role(prefill, Role.DECODE)) == others(decode)
    assert others(in_role(decode, Role.PREFILL)) == others(prefill)
    assert in_role(in_role(prefill, Role.MIXED), Role.PREFILL) == prefill


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Config(), "float16"),
        (Config(model=ModelConfig(activations="float32")), "float32"),
        (Config(model=ModelConfig(dtype="bfloat16")), "bfloat16"),
        (Config(kv=KVConfig(dtype="float32")), "float32"),
        (Config(model=ModelConfig(activations="float32"), kv=KVConfig(dtype="float16")), "float16"),
    ],
)
def test_keys_and_values_are_no_finer_than_what_is_computed_with(config: Config, expected: str) -> None:
    """Where activations are bytes float16 is the default; what is configured comes first."""
    assert {worker.kv_dtype for worker in planned(config).workers} == {expected}
