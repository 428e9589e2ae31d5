"""From the configuration and the host to a plan: which workers, on which cores, with how much KV memory, how long a context.

Everything that can be refused is refused here, before a process starts, with the number that would be needed. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from disagg import grammar
from disagg.config import Config, parse_size
from disagg.cores import Cores, share_out
from disagg.errors import ConfigError, StartupError
from disagg.kv import KVLayout
from disagg.messages import VERSION, Configure
from disagg.model import ModelFiles, ModelSpec, kv_layout
from disagg.supervisor import Role

_AUTO_KV_SHARE = 0.25  # of the memory that is free, for all workers together
_AUTO_KV_MOST = 1 << 30
_AUTO_KV_AMPLE = 384 << 20  # more only for sequences that run, not to keep what may be asked again
_PREFILL_NICE = 10
_GROWTH_BLOCKS = 1  # a sequence at full length still needs the slot of the token being sampled


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """What will be started. ``workers`` are in the order prefill, decode or all mixed."""

    mode: str  # "disagg" or "colocated"
    device: str
    max_model_len: int
    vocab_size: int
    layout: KVLayout
    workers: list[Configure]


def plan(
    config: Config,
    files: ModelFiles,
    spec: ModelSpec,
    *,
    vocab_size: int,
    run_id: str,
    cpus: Sequence[Sequence[int]],
    free_nbytes: int,
    is_part: bool,
) -> Deployment:
    """Decide. ``cpus`` are the cores this process may use, by memory node, ``free_nbytes`` the memory that is free.

    ``is_part``: other nodes have workers of the same server, so that these need not be able to serve by themselves.

    Raises ConfigError or StartupError.
    """
    device = _device(config)
    roles = planned_roles(config, cpus)
    if not is_part and (missing := {Role.PREFILL, Role.DECODE} - set(roles)) and Role.MIXED not in roles:
        names = " and ".join(f"workers.{role} = 0" for role in sorted(missing))
        raise ConfigError(f"{names}: nobody would do that; only with --cluster-listen can other nodes")
    dtype = "float32" if config.model.dtype == "auto" else config.model.dtype
    kv_dtype = _kv_dtype(config, dtype)
    layout = kv_layout(spec, kv_dtype, config.kv.block_size, config.model.quantize, config.model.activations)
    max_model_len, kv_nbytes, ample_nbytes = _kv_budget(config, spec, layout, len(roles), free_nbytes)
    shares = [Cores([], []) for _ in roles]
    if config.workers.pin_cpus:
        shares = share_out(roles, cpus, lend=config.workers.lend_cpus)
    counts = dict.fromkeys(Role, 0)
    workers = []
    for role, share in zip(roles, shares, strict=True):
        workers.append(
            Configure(
                version=VERSION,
                run_id=run_id,
                worker=f"{role}-{counts[role]}",
                epoch=0,
                role=role,
                model=str(files.path) if files.kind != "null" else "null",
                device=device,
                dtype=dtype,
                kv_dtype=kv_dtype,
                quantize=config.model.quantize,
                activations=config.model.activations,
                block_size=config.kv.block_size,
                kv_nbytes=kv_nbytes,
                kv_ample_nbytes=ample_nbytes,
                max_model_len=max_model_len,
                vocab_size=vocab_size,
                chunk_tokens=config.scheduler.chunk_tokens,
                max_num_seqs=config.scheduler.max_num_seqs,
                prefix_cache=config.kv.prefix_cache,
                cpus=share.own,
                lent_cpus=share.lent,
                pace_s=config.scheduler.pace_ms / 1e3,
                nice=_nice(role),
                poison=config.kv.poison,
                verify_kv=config.kv.verify,
                has_far_peers=is_part or config.handoff.transport == "ucx",
                handoff=config.handoff,
                has_grammars=grammar.is_installed(),
                log=config.log,
            )
        )
        counts[role] += 1
    mode = "colocated" if Role.MIXED in roles else "disagg"
    return Deployment(
        mode=mode, device=device, max_model_len=max_model_len, vocab_size=vocab_size, layout=layout, workers=workers
    )


def in_role(settings: Configure, role: Role) -> Configure:
    """The same worker doing something else."""
    return msgspec.structs.replace(settings, role=role, nice=_nice(role))


def longest_sequence(kv_nbytes: int, layout: KVLayout) -> int:
    """Tokens of the longest request that a pool of ``kv_nbytes`` can hold; below 1 when it holds none."""
    return (kv_nbytes // layout.block_nbytes - _GROWTH_BLOCKS) * layout.block_size


def free_memory() -> int:
    """Bytes that processes of this host, or of this control group if it is limited, can still take."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return free


def _nice(role: Role) -> int:
    return _PREFILL_NICE if role is Role.PREFILL else 0


def _kv_dtype(config: Config, dtype: str) -> str:
    """Where activations are rounded to bytes, 11 bits of a key or value are more than enough, and half as many to read."""
    if config.kv.dtype != "auto":
        return config.kv.dtype
    return "float16" if dtype == "float32" and config.model.activations == "int8" else dtype


def _device(config: Config) -> str:
    if config.workers.device == "cuda":
        raise ConfigError("workers.device = cuda: this version runs on the CPU only; use --device cpu")
    return "cpu"


def planned_roles(config: Config, cpus: Sequence[Sequence[int]]) -> list[Role]:
    workers, num_workers = config.workers, config.workers.prefill + config.workers.decode
    if workers.mode == "colocated" or (workers.mode == "auto" and sum(map(len, cpus)) < num_workers):
        return [Role.MIXED] * workers.mixed
    return [Role.PREFILL] * workers.prefill + [Role.DECODE] * workers.decode


def _kv_budget(config: Config, spec: ModelSpec, layout: KVLayout, num_workers: int, free_nbytes: int) -> tuple[int, int, int]:
    """(longest sequence in tokens, bytes of each worker's pool, bytes of it that cached blocks may make it use)."""
    block_nbytes = layout.block_nbytes
    wanted_len = config.model.max_model_len or spec.max_position
    if wanted_len > spec.max_position:
        raise ConfigError(f"model.max_model_len = {wanted_len}: the model was made for at most {spec.max_position} tokens")
    if not num_workers:
        return wanted_len, 0, 0
    if config.kv.memory == "auto":
        most_useful = config.scheduler.max_num_seqs * (layout.num_blocks(wanted_len) + _GROWTH_BLOCKS) * block_nbytes
        kv_nbytes = int(min(free_nbytes * _AUTO_KV_SHARE / num_workers, _AUTO_KV_MOST, most_useful))
        ample_nbytes = min(kv_nbytes, _AUTO_KV_AMPLE)
    else:
        kv_nbytes = ample_nbytes = parse_size(config.kv.memory)
        if kv_nbytes * num_workers > free_nbytes:
            raise StartupError(
                f"kv.memory = {config.kv.memory} for each of {num_workers} workers needs "
                f"{kv_nbytes * num_workers / 2**30:.1f} GiB, {free_nbytes / 2**30:.1f} GiB are free"
            )
    fits_len = longest_sequence(kv_nbytes, layout)
    needed = (layout.num_blocks(config.model.max_model_len or config.kv.block_size) + _GROWTH_BLOCKS) * block_nbytes
    if fits_len < config.kv.block_size or (config.model.max_model_len and fits_len < config.model.max_model_len):
        raise StartupError(
            f"a KV pool of {kv_nbytes / 2**20:.0f} MiB holds {max(0, fits_len)} tokens; "
            f"set kv.memory to {-(-needed // 2**20)}MiB or more, or a smaller model.max_model_len"
        )
    return min(wanted_len, fits_len), kv_nbytes // block_nbytes * block_nbytes, ample_nbytes
