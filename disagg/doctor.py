"""``disagg doctor``: what would keep this host from serving with these settings, with the cause and what to do about it.

Each check looks at one thing and answers pass, warn (it serves, but slowly or not everything) or fail (it will not serve).
What imports torch or UCX is asked of a child process, as workers are: a library that crashes or hangs is then a finding.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from disagg.config import Config
from disagg.cores import host_cpus
from disagg.deployment import free_memory, plan
from disagg.errors import ConfigError, DisaggError
from disagg.handoff.host_pool import create_pool, populate
from disagg.model import ModelFiles, find_model, read_model_spec
from disagg.speed import copy_rate, handoff_rate
from disagg.text.chat_template import load_chat_template
from disagg.text.tokenizer import load_tokenizer

_CHILD_S = 60.0
_FEW_FILES = 4096  # a stream is a descriptor, and so is every worker's channel
_SLOW_COPY = 2.0  # GB/s
_SLOW_HANDOFF = 1.0  # GB/s
_RDMA_MEMLOCK = 1 << 30

_ASK_TORCH = """
import json, torch
devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
print(json.dumps({"version": torch.__version__, "built_for": torch.version.cuda or "cpu",
                  "kernels": torch.backends.cpu.get_cpu_capability(), "devices": devices}))
"""
_ASK_UCX = """
import json, sys
from disagg.handoff.ucp import Ucp
from importlib.metadata import version
Ucp({"TLS": sys.argv[1], "NET_DEVICES": sys.argv[2]})
print(json.dumps({"version": version("ucxx-cu13")}))
"""


class Verdict(StrEnum):
    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


class Check(msgspec.Struct, frozen=True):
    """``fix``: what to do; empty when there is nothing to do."""

    name: str
    verdict: Verdict
    finding: str
    fix: str = ""


class _Torch(msgspec.Struct):
    version: str
    built_for: str
    kernels: str
    devices: list[str]


class _Ucx(msgspec.Struct):
    version: str


def run(config: Config, *, as_json: bool) -> int:
    """Print every check as it is done. Returns 0, or 1 when one failed."""
    checks: list[Check] = []
    console = Console(highlight=False)
    for check in examine(config):
        checks.append(check)
        if not as_json:
            console.print(_line(check), soft_wrap=True)
    has_failed = any(check.verdict is Verdict.FAIL for check in checks)
    if as_json:
        body = msgspec.json.encode({"ok": not has_failed, "checks": checks})
        sys.stdout.write(msgspec.json.format(body).decode() + "\n")
    else:
        counts = {verdict: sum(check.verdict is verdict for check in checks) for verdict in Verdict}
        console.print(Text("\n" + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()), style="bold"))
    return int(has_failed)


def examine(config: Config) -> Iterator[Check]:
    """All checks, in order; one that breaks is itself a failure, and the others go on."""
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("python", _python),
        ("torch", _torch),
        ("cpu", lambda: cpu(_cpu_flags(Path("/proc/cpuinfo")))),
        ("open files", lambda: open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])),
        (
            "locked memory",
            lambda: locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[1], _has_far_peers(config)),
        ),
        ("shared memory", _shared_memory),
        ("port", lambda: port(config.server.host, config.server.port)),
        ("environment", lambda: environment(os.environ)),
        ("ucx", lambda: _ucx(config)),
        ("model", lambda: _model(config)),
        ("chat template", lambda: _template(config)),
        ("memory", lambda: _memory(config)),
        ("memory copy", lambda: memory_copy(copy_rate())),
        ("hand-over", lambda: handover(handoff_rate())),
    ]
    for name, check in checks:
        try:
            yield check()
        except DisaggError as error:
            yield Check(name, Verdict.FAIL, str(error))


def _python() -> Check:
    finding = f"{platform.python_implementation()} {platform.python_version()} on {platform.system()} {platform.release()}"
    if sys.platform != "linux":
        return Check("python", Verdict.FAIL, finding, "serve on Linux: workers share memory by its means")
    return Check("python", Verdict.PASS, finding)


def _torch() -> Check:
    try:
        found = msgspec.json.decode(_ask(_ASK_TORCH), type=_Torch)
    except _ChildError as error:
        return Check("torch", Verdict.FAIL, f"cannot be imported: {error}", "install it: pip install torch")
    finding = f"torch {found.version} for {found.built_for}, kernels for {found.kernels}"
    if found.devices:
        return Check("torch", Verdict.PASS, f"{finding}; {', '.join(found.devices)}")
    if Path("/dev/nvidia0").exists():
        fix = "install a build of torch for the driver's CUDA version, or look for CUDA_VISIBLE_DEVICES"
        return Check("torch", Verdict.WARN, f"{finding}; it cannot use the GPU that is here", fix)
    return Check("torch", Verdict.PASS, f"{finding}; no GPU, so the CPU computes")


def _cpu_flags(cpuinfo: Path) -> set[str]:
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))), set())


_CPU_NAMES = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "amx_int8": "AMX",
    "asimd": "NEON",
    "asimddp": "NEON dot products",
    "sve": "SVE",
}


def cpu(flags: set[str]) -> Check:
    found = [name for flag, name in _CPU_NAMES.items() if flag in flags]
    finding = f"{sum(map(len, host_cpus()))} cores, {', '.join(found) or 'no vector instructions that are known'}"
    if not flags & {"avx2", "asimd"}:
        return Check("cpu", Verdict.WARN, finding, "expect slow answers: use a CPU with AVX2, or a GPU")
    return Check("cpu", Verdict.PASS, finding)


def open_files(hard_limit: int) -> Check:
    """The server raises its own limit to the hard one."""
    if hard_limit == resource.RLIM_INFINITY or hard_limit >= _FEW_FILES:
        return Check("open files", Verdict.PASS, "unlimited" if hard_limit == resource.RLIM_INFINITY else f"up to {hard_limit}")
    fix = f"raise the hard limit (ulimit -Hn, LimitNOFILE=) to {_FEW_FILES} or more"
    return Check("open files", Verdict.WARN, f"{hard_limit}: that is all streams and workers together", fix)


def locked_memory(hard_limit: int, uses_rdma: bool) -> Check:
    """RDMA registers pools, and what is registered is locked. Shared memory within a node needs none."""
    finding = "unlimited" if hard_limit == resource.RLIM_INFINITY else f"{hard_limit / 2**20:.0f} MiB"
    if uses_rdma and hard_limit != resource.RLIM_INFINITY and hard_limit < _RDMA_MEMLOCK:
        fix = "ulimit -l unlimited, or LimitMEMLOCK=infinity, on hosts with RDMA devices"
        return Check("locked memory", Verdict.WARN, f"{finding}: RDMA could not register a KV pool", fix)
    return Check("locked memory", Verdict.PASS, finding if uses_rdma else f"{finding} (not needed without RDMA)")


def _shared_memory() -> Check:
    """A pool as a worker makes it. It is no file of /dev/shm, whose size therefore does not matter."""
    fd, mapping = create_pool(1 << 20, "disagg-doctor")
    try:
        populate(mapping)
    finally:
        mapping.release()
        os.close(fd)
    return Check("shared memory", Verdict.PASS, "anonymous memory files, sealed; /dev/shm is not used")


def port(host: str, number: int) -> Check:
    where = f"{host} port {number}"
    try:
        for family, kind, proto, _, address in socket.getaddrinfo(host, number, type=socket.SOCK_STREAM):  # on all of them
            with socket.socket(family, kind, proto) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
                probe.bind(address)
    except UnicodeError:
        return Check("port", Verdict.FAIL, f"{where}: that is no name of a host", "choose another with --host")
    except OSError as error:
        return Check("port", Verdict.FAIL, f"{where}: {error.strerror}", "choose another with --port, or 0 for any that is free")
    return Check("port", Verdict.PASS, f"{where} is free" if number else "any free one")


def environment(variables: Mapping[str, str]) -> Check:
    """Workers are started without UCX_*; what else is known to spoil them is named."""
    ucx = sorted(name for name in variables if name.startswith("UCX_"))
    findings = [f"{', '.join(ucx)} set, and ignored"] if ucx else []
    fixes = ["use --ucx-tls and --ucx-devices instead"] if ucx else []
    if "expandable_segments:true" in variables.get("PYTORCH_CUDA_ALLOC_CONF", "").lower():
        findings.append("PYTORCH_CUDA_ALLOC_CONF has expandable_segments, which cannot be shared between processes")
        fixes.append("unset it")
    if findings:
        return Check("environment", Verdict.WARN, "; ".join(findings), "; ".join(fixes))
    return Check("environment", Verdict.PASS, "nothing that would change a worker")


def _has_far_peers(config: Config) -> bool:
    return bool(config.cluster.listen) or config.handoff.transport == "ucx"


def _ucx(config: Config) -> Check:
    is_needed = _has_far_peers(config)
    if importlib.util.find_spec("ucxx") is None:
        fix = "pip install 'disagg[ucx]'" if is_needed else ""
        return Check("ucx", Verdict.FAIL if is_needed else Verdict.PASS, "not installed; only other nodes need it", fix)
    try:
        found = msgspec.json.decode(_ask(_ASK_UCX, config.handoff.ucx_tls, config.handoff.ucx_devices), type=_Ucx)
    except _ChildError as error:
        fix = "see --ucx-tls and --ucx-devices; pip install 'disagg[ucx]'"
        return Check("ucx", Verdict.FAIL if is_needed else Verdict.WARN, f"does not start: {error}", fix)
    devices = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    networks = sorted(path.name for path in Path("/sys/class/net").glob("*") if path.name != "lo")
    finding = f"ucxx {found.version} starts; RDMA: {', '.join(devices) or 'none'}; network: {', '.join(networks) or 'none'}"
    return Check("ucx", Verdict.PASS, finding)


def _model(config: Config) -> Check:
    files = find_model(config.model.path)
    spec = read_model_spec(files)
    nbytes = _weight_nbytes(files)
    finding = f"{files.name}: {spec.architecture}, {spec.num_layers} layers, {spec.max_position} tokens, {nbytes / 2**20:.0f} MiB"
    return Check("model", Verdict.PASS, finding)


def _weight_nbytes(files: ModelFiles) -> int:
    """Of the weight files. Raises ConfigError when one cannot be read."""
    paths = {"gguf": [files.path], "hf": sorted(files.path.glob("*.safetensors")), "null": []}[files.kind]
    nbytes = 0
    for path in paths:
        try:
            with path.open("rb") as file:
                file.read(1)
            nbytes += path.stat().st_size
        except OSError as error:
            raise ConfigError(f"model.path: {path} cannot be read: {error.strerror}") from error
    return nbytes


def _template(config: Config) -> Check:
    files = find_model(config.model.path)
    template = load_chat_template(files, load_tokenizer(files))
    if template is None:
        return Check("chat template", Verdict.WARN, "the model has none", "use /v1/completions; chat is refused")
    ids = template.encode([{"role": "user", "content": "Hello"}])
    return Check("chat template", Verdict.PASS, f"renders in its sandbox; a greeting is {len(ids)} tokens")


def _memory(config: Config) -> Check:
    """The plan of ``disagg serve`` itself, which refuses what does not fit and says what would."""
    files = find_model(config.model.path)
    spec = read_model_spec(files)
    free = free_memory()
    planned = plan(
        config,
        files,
        spec,
        vocab_size=spec.vocab_size,
        run_id="doctor",
        cpus=host_cpus(),
        free_nbytes=free,
        is_part=bool(config.cluster.listen),
    )
    kv_nbytes = sum(worker.kv_nbytes for worker in planned.workers)
    each = planned.workers[0].kv_nbytes if planned.workers else 0
    finding = (
        f"{free / 2**30:.1f} GiB free; {planned.mode}, {len(planned.workers)} workers with {each / 2**20:.0f} MiB of KV each, "
        f"contexts up to {planned.max_model_len} tokens"
    )
    # Weights are kept as they are in the file, or wider: a lower bound.
    needed = kv_nbytes + len(planned.workers) * _weight_nbytes(files)
    if needed > free:
        fix = f"fewer workers or a smaller --kv-memory: at least {needed / 2**30:.1f} GiB are needed with the weights"
        return Check("memory", Verdict.WARN, finding, fix)
    return Check("memory", Verdict.PASS, finding)


def memory_copy(gb_per_s: float) -> Check:
    verdict = Verdict.WARN if gb_per_s < _SLOW_COPY else Verdict.PASS
    fix = "is the host busy, or swapping? Decode is bound by this rate" if verdict is Verdict.WARN else ""
    return Check("memory copy", verdict, f"{gb_per_s:.1f} GB/s on one core", fix)


def handover(gb_per_s: float) -> Check:
    verdict = Verdict.WARN if gb_per_s < _SLOW_HANDOFF else Verdict.PASS
    fix = "is the host busy, or swapping? See the memory copy above" if verdict is Verdict.WARN else ""
    return Check("hand-over", verdict, f"{gb_per_s:.1f} GB/s through shared memory between two processes, bytes intact", fix)


class _ChildError(Exception):
    """What a child process was asked it could not answer; the message is the last thing it said."""


def _ask(program: str, *arguments: str) -> bytes:
    """What ``program`` prints, from a Python of its own. Raises _ChildError."""
    command = [sys.executable, "-P", "-c", program, *arguments]
    try:
        child = subprocess.run(command, capture_output=True, timeout=_CHILD_S, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise _ChildError(f"no answer within {_CHILD_S:g} s") from None
    if child.returncode:
        said = child.stderr.decode(errors="replace").strip().splitlines()
        raise _ChildError(said[-1] if said else f"exit code {child.returncode}")
    return child.stdout


def _line(check: Check) -> Text:
    style = {Verdict.PASS: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}[check.verdict]
    line = Text.assemble((f"{check.verdict:<4}", style), f"  {check.name:<14}  {check.finding}")
    return line.append(f"\n{'':22}→ {check.fix}", style="bold") if check.fix else line
