"""What is planned fits: contexts into pools, pools into the memory that is free, workers onto cores; all else is refused."""

from __future__ import annotations

import itertools
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.config import Config, KVConfig, ModelConfig, WorkersConfig
from disagg.deployment import Deployment, in_role, plan
from disagg.errors import StartupError
from disagg.messages import Configure
from disagg.model import ModelFiles, find_model, kv_layout, read_model_spec
from disagg.supervisor import Role

FILES: ModelFiles = find_model("null")
SPEC = read_model_spec(FILES)
MIB = 1 << 20


def planned(config: Config, *, cpus: int = 2, free_nbytes: int = 1 << 34) -> Deployment:
    return plan(config, FILES, SPEC, vocab_size=259, run_id="r", cpus=range(cpus), free_nbytes=free_nbytes, is_part=False)


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


def test_pools_that_are_not_there_are_refused_with_what_they_need_and_what_is_free() -> None:
    """All workers together: each pool alone would fit."""
    config = Config(kv=KVConfig(memory="1GiB"), workers=WorkersConfig(prefill=2, decode=2))
    assert len(planned(config, cpus=4, free_nbytes=4 << 30).workers) == 4
    with pytest.raises(StartupError, match=r"each of 4 workers needs 4\.0 GiB, 3\.0 GiB are free"):
        planned(config, cpus=4, free_nbytes=3 << 30)


@given(num_cpus=st.integers(1, 12), prefill=st.integers(1, 4), decode=st.integers(1, 4))
def test_cores_are_shared_out_to_the_last_and_none_twice(num_cpus: int, prefill: int, decode: int) -> None:
    """Disjoint and complete; with fewer cores than workers nobody has cores of its own."""
    config = Config(workers=WorkersConfig(mode="disagg", prefill=prefill, decode=decode), kv=KVConfig(memory="1MiB"))
    shares = [worker.cpus for worker in planned(config, cpus=num_cpus).workers]
    taken = list(itertools.chain(*shares))
    assert sorted(taken) == (list(range(num_cpus)) if num_cpus >= prefill + decode else [])
    assert len(shares) == prefill + decode


def test_a_worker_in_another_role_is_as_if_it_had_been_planned_so() -> None:
    """Everything but its name and its cores, which it keeps."""

    def others(worker: Configure) -> Configure:
        return msgspec.structs.replace(worker, worker="", cpus=[])

    prefill, decode = planned(Config()).workers
    assert others(in_role(prefill, Role.DECODE)) == others(decode)
    assert others(in_role(decode, Role.PREFILL)) == others(prefill)
    assert in_role(in_role(prefill, Role.MIXED), Role.PREFILL) == prefill
