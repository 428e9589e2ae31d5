"""The configuration: what can be set, its defaults and its limits. Written once here, frozen, checked before any process starts.

Everything else is derived from these structs: the flags of ``disagg serve``, their help, the names of environment variables,
and what an error says is allowed (``disagg.settings``).
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Literal

from msgspec import Meta, Struct

from disagg.errors import ConfigError


class ServerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="TCP port; 0 = any free one, printed when ready")] = 8000
    max_body_bytes: Annotated[int, Meta(ge=1024, description="largest request body accepted")] = 8 << 20
    drain_s: Annotated[float, Meta(ge=0, description="seconds that running streams get to finish after SIGTERM or Ctrl-C")] = 30.0
    keepalive_s: Annotated[float, Meta(gt=0, description="seconds between comments on a stream that is silent")] = 10.0
    api_key_file: Annotated[
        str,
        Meta(description="file with the API keys to let in, one on a line, bare or as name:key; empty = no key is needed"),
    ] = ""
    insecure: Annotated[bool, Meta(description="listen off loopback without API keys: all who can reach it can use it")] = False
    tls_cert: Annotated[str, Meta(description="PEM file with the certificate to show, read again on SIGHUP; empty = no TLS")] = ""
    tls_key: Annotated[str, Meta(description="PEM file with the key of tls_cert; empty = it is in the same file")] = ""
    cors_origins: Annotated[
        str, Meta(description="web pages that may call from a browser, such as https://chat.example; * = all, empty = none")
    ] = ""
    max_streams_per_key: Annotated[int, Meta(ge=0, description="requests that one API key may have running; 0 = no limit")] = 0
    requests_per_minute: Annotated[int, Meta(ge=0, description="requests a minute that one API key may send; 0 = no limit")] = 0
    admin_socket: Annotated[
        str,
        Meta(description="Unix socket on which an operator drains and aborts: a path, off, or auto = in the runtime folder"),
    ] = "auto"


class ModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: Annotated[str, Meta(description="smollm2 (built in), a GGUF file, a Hugging Face folder, or null (no model)")] = (
        "smollm2"
    )
    name: Annotated[str, Meta(description="name that clients use; empty = taken from the model's files")] = ""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], Meta(description="type of weights and arithmetic; auto = float32 on CPU")
    ] = "auto"
    quantize: Annotated[
        Literal["none", "int8"],
        Meta(description="make smaller what the files hold as floats; int8 = 8 bits, with a scale for each 32 weights"),
    ] = "none"
    activations: Annotated[
        Literal["int8", "float32"],
        Meta(description="what quantised weights are multiplied with; float32 is exact, int8 within 0.5% and twice as fast"),
    ] = "int8"
    tool_parser: Annotated[
        Literal["auto", "hermes", "llama3", "mistral", "none"],
        Meta(description="how the model writes tool calls; auto = as its chat template shows, none = tools are refused"),
    ] = "auto"
    max_model_len: Annotated[
        int, Meta(ge=0, description="longest prompt + answer in tokens; 0 = what the model allows and memory holds")
    ] = 0


class WorkersConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: Annotated[
        Literal["disagg", "colocated", "auto"],
        Meta(description="disagg: prefill and decode apart; colocated: every worker does both; auto: disagg where it fits"),
    ] = "auto"
    prefill: Annotated[int, Meta(ge=0, le=64, description="number of prefill workers; 0 = they are on other nodes")] = 1
    decode: Annotated[int, Meta(ge=0, le=64, description="number of decode workers; 0 = they are on other nodes")] = 1
    mixed: Annotated[int, Meta(ge=1, le=64, description="number of workers where every one does both (colocated)")] = 1
    device: Annotated[Literal["cpu", "cuda", "auto"], Meta(description="where the workers run")] = "auto"
    pin_cpus: Annotated[bool, Meta(description="give each CPU worker cores of its own")] = True
    lend_cpus: Annotated[
        bool, Meta(description="while prefill or decode has nothing to do, let the other use its cores as well (with pin_cpus)")
    ] = True
    start_s: Annotated[float, Meta(gt=0, description="seconds a worker may take to load")] = 300.0
    fallback: Annotated[
        bool, Meta(description="while no pair can serve, let the workers that are left do both prefill and decode")
    ] = True
    hang_s: Annotated[float, Meta(gt=0, description="seconds a worker may neither speak nor use its CPU before it is killed")] = (
        2.0
    )
    stuck_s: Annotated[
        float, Meta(gt=0, description="seconds a worker may compute without a word, as in one long step, before it is killed")
    ] = 300.0
    max_restarts: Annotated[
        int, Meta(ge=0, description="restarts of one worker within restart_window_s before the server gives up")
    ] = 5
    restart_window_s: Annotated[float, Meta(gt=0, description="seconds over which max_restarts is counted")] = 300.0


class KVConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    block_size: Annotated[int, Meta(ge=1, le=256, description="tokens in a KV block")] = 16
    dtype: Annotated[
        Literal["auto", "float32", "float16"],
        Meta(description="type of the KV cache; auto = float16 with activations = int8, else as model.dtype"),
    ] = "auto"
    memory: Annotated[str, Meta(description="KV memory of each worker, such as 2GiB; auto = a share of what is free")] = "auto"
    prefix_cache: Annotated[bool, Meta(description="keep finished blocks and reuse them for equal prefixes")] = True
    poison: Annotated[bool, Meta(description="fill new pools with NaN, so that a read of an unwritten slot shows")] = False
    verify: Annotated[
        bool, Meta(description="digest every KV block before and after its hand-over; one that differs is sent again")
    ] = False


class HandoffConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    transport: Annotated[
        Literal["auto", "ucx"], Meta(description="auto: shared memory within a node, UCX across nodes; ucx: UCX for every pair")
    ] = "auto"
    ucx_tls: Annotated[str, Meta(description="transports that UCX may use, such as tcp or rc,cuda; all = what it finds best")] = (
        "all"
    )
    ucx_devices: Annotated[
        str, Meta(description="network devices that UCX may use, such as mlx5_0:1 or eth0; all = what it finds best")
    ] = "all"
    stall_s: Annotated[
        float, Meta(gt=0, description="seconds without progress after which a hand-over between nodes is given up")
    ] = 10.0


class SchedulerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    chunk_tokens: Annotated[int, Meta(ge=1, description="most prompt tokens computed in one step")] = 512
    pace_ms: Annotated[
        float,
        Meta(ge=0, le=1000, description="while prompts are computed: least time between decode steps; 0 = as fast as can be"),
    ] = 0.0
    max_num_seqs: Annotated[int, Meta(ge=1, description="most sequences a worker runs at once")] = 256
    max_queue: Annotated[int, Meta(ge=0, description="requests that may wait for a worker; more get a 429")] = 1024
    max_attempts: Annotated[
        int, Meta(ge=1, description="times a request is started, over workers that die, before its client gets an error")
    ] = 4
    queue_s: Annotated[float, Meta(gt=0, description="seconds a request may wait while no worker can serve it")] = 60.0
    reserve_s: Annotated[float, Meta(gt=0, description="seconds a request may wait for blocks on decode")] = 60.0


class ClusterConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    listen: Annotated[
        str, Meta(description="HOST:PORT on which other nodes may join with workers (disagg worker --join); empty = none may")
    ] = ""
    token_file: Annotated[str, Meta(description="file with the secret that all nodes share, at least 16 bytes")] = ""
    lease_s: Annotated[float, Meta(gt=0, description="seconds of silence after which a node counts as lost")] = 5.0
    tls_cert: Annotated[str, Meta(description="PEM file with the certificate that nodes are shown; empty = no TLS")] = ""
    tls_key: Annotated[str, Meta(description="PEM file with the key of tls_cert; empty = it is in the same file")] = ""
    tls_ca: Annotated[str, Meta(description="PEM file with the certificates that a node trusts; empty = no TLS")] = ""


class LogConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: Annotated[Literal["auto", "json", "console"], Meta(description="auto = console on a terminal, else json")] = "auto"
    level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="least severe line that is logged")] = "info"


class MetricsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    compat: Annotated[
        Literal["none", "vllm"], Meta(description="vllm: also show the figures by the names that dashboards for vLLM plot")
    ] = "none"


class TracingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    otlp_endpoint: Annotated[
        str, Meta(description="URL of an OpenTelemetry collector that takes spans, such as http://127.0.0.1:4318; empty = none")
    ] = ""


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    server: ServerConfig = ServerConfig()
    model: ModelConfig = ModelConfig()
    workers: WorkersConfig = WorkersConfig()
    kv: KVConfig = KVConfig()
    handoff: HandoffConfig = HandoffConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    cluster: ClusterConfig = ClusterConfig()
    log: LogConfig = LogConfig()
    metrics: MetricsConfig = MetricsConfig()
    tracing: TracingConfig = TracingConfig()


def parse_address(text: str) -> tuple[str, int]:
    """Host and port in ``10.0.0.1:7000``, ``node-1:7000``, ``[::1]:7000``. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_bracketed else host
    if not host or (":" in host and not is_bracketed) or not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ConfigError(f"{text!r} is not HOST:PORT, such as 10.0.0.1:7000 or [::1]:7000")
    return host, int(port)


_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) *(?:([KMGT])(iB|i|B)?|B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes in ``text``: ``2GiB``, ``512M``, ``1.5GB``, ``4096``.

    KB, MB, GB and TB are powers of 1000. KiB, MiB, GiB and TiB, and the bare letters, are powers of 1024, as for systemd and
    Docker. Raises ConfigError for anything else and for sizes that come to less than one byte.
    """
    match = _SIZE.fullmatch(text.strip())
    nbytes = 0
    if match:
        number, letter, suffix = match.groups()
        base = 1000 if (suffix or "").upper() == "B" else 1024
        nbytes = int(Decimal(number) * base ** (" KMGT".index(letter.upper()) if letter else 0))
    if nbytes < 1:
        raise ConfigError(f"{text!r} is not a size: write a number and a unit, such as 512MiB or 2GiB")
    return nbytes
