"""Everything that crosses between the parent and a worker: frozen, tagged, versioned structs, encoded as MessagePack.

The order of one disaggregated dispatch (P = prefill worker, D = decode worker):

    parent → D  Reserve      D → parent  Reserved | Refused
    parent → P  Prefill      P → parent  Prefilled (the first token), then Pushed (all bytes are in D's blocks)
    parent → D  Commit       D → parent  Tokens … the last one carries a finish reason; or Rejected: Abort it, and try again
    parent → P/D  Abort      P/D → parent  Quiesced: nothing of this dispatch can be read or written there any more

A colocated dispatch is ``Prefill`` without a target: the worker goes on decoding by itself.

Messages about one dispatch that arrive late, twice or for an unknown dispatch are counted and ignored by both sides. Garbage
raises ProtocolError and nothing else. File descriptors travel beside a frame; ``num_fds`` says how many belong to it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from disagg.config import HandoffConfig, LogConfig
from disagg.errors import ProtocolError
from disagg.kv import KVLayout
from disagg.request import SamplingParams

VERSION = 6
"""Raise it when any struct below changes its fields or their meaning."""


# ------------------------------------------------------------------------------------------------ parent → worker


class Configure(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """First frame on every channel: all a worker needs to build itself."""

    version: int
    run_id: str
    worker: str
    epoch: int
    role: str
    model: str  # a path, or "null"
    device: str
    dtype: str
    block_size: int
    kv_nbytes: int
    max_model_len: int
    vocab_size: int  # ids at and above it are never sampled
    chunk_tokens: int  # most prompt tokens of one step
    max_num_seqs: int
    prefix_cache: bool
    cpus: list[int]  # the cores that are its own; empty = it runs on all
    nice: int
    poison: bool  # fill new pools with NaN so that a read of an unwritten slot shows
    log: LogConfig
    verify_kv: bool = False  # digest every block that is pushed
    has_far_peers: bool = False  # it hands over to, or from, workers that are reached by address
    handoff: HandoffConfig = HandoffConfig()
    has_grammars: bool = False  # requests may come with one (SamplingParams.grammar)
    lent_cpus: list[int] = []  # the cores that it may use while their owners have nothing to do
    pace_s: float = 0.0  # decode's steps begin no closer than this while the owners of those have something to do
    quantize: str = "none"
    activations: str = "int8"
    kv_dtype: str = "float32"
    kv_ample_nbytes: int = 0  # where the pool stops to grow for cached blocks' sake; 0 = its end


class Connect(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Open the way to decode worker ``peer``, for pushing: its pool's file descriptor in a node, its ``address`` across nodes."""

    peer: str
    epoch: int
    layout: KVLayout
    num_blocks: int
    address: bytes = b""
    num_fds: int = 1


class Disconnect(msgspec.Struct, frozen=True, array_like=True, tag=True):
    peer: str
    epoch: int


class Reserve(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Set blocks aside for the tokens (less what the prefix cache holds) and one more, or queue for them.

    ``tokens`` is the prompt and, after a failover, what has been generated since. ``timeout_s`` bounds the wait; after it the
    answer is Refused. ``is_received``: the bytes will come over a two-sided transport, so receives are posted for them.
    ``priority`` is the request's.
    """

    dispatch: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    timeout_s: float
    is_received: bool = False
    priority: int = 0


class Target(msgspec.Struct, frozen=True, array_like=True):
    """Where a prefill goes: block ``i`` of its tokens into ``blocks[i]`` of ``peer``, from block ``num_cached_blocks`` on.

    ``key`` is Reserved's.
    """

    peer: str
    epoch: int
    blocks: list[int]
    num_cached_blocks: int
    key: int = 0


class Prefill(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Compute ``tokens``, as in Reserve, and sample the one after them. ``priority`` is the request's."""

    dispatch: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    target: Target | None  # None: colocated, go on decoding here
    priority: int = 0


class Commit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All bytes have arrived and prefill has sampled ``next_token``: decode from the one after it on.

    ``digests`` are those of Pushed, for decode to compare its blocks with first.
    """

    dispatch: int
    next_token: int
    digests: list[int] = []


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End the dispatch, in whatever state it is, and answer Quiesced when its blocks are back."""

    dispatch: int


class Probe(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Fill ``blocks`` of ``peer`` with a pattern drawn from ``dispatch``, timed, and answer Probed. ``key`` is Reserved's."""

    dispatch: int
    peer: str
    epoch: int
    blocks: list[int]
    key: int = 0


class Verify(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Digest the blocks reserved for ``dispatch`` and answer Verified."""

    dispatch: int


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


# ------------------------------------------------------------------------------------------------ worker → parent


class Loading(msgspec.Struct, frozen=True, array_like=True, tag=True):
    fraction: float
    what: str


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The worker can serve. One file descriptor: its pool, for peers in this node; ``address``: for peers in others, if any."""

    version: int
    layout: KVLayout
    num_blocks: int
    device: str
    num_threads: int
    load_s: float
    address: bytes = b""
    num_fds: int = 1


class StartFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    reason: str


class Connected(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """``is_two_sided``: the peer must post a receive for what is pushed to it (Reserve.is_received)."""

    peer: str
    epoch: int
    transport: str
    error: str | None
    is_two_sided: bool = False


class Probed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    dispatch: int
    digest: bytes
    nbytes: int
    seconds: float
    error: str | None


class Verified(msgspec.Struct, frozen=True, array_like=True, tag=True):
    dispatch: int
    digest: bytes
    error: str | None = None


class Reserved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """``key`` is what the writer must show for its bytes to be received; 0 where nothing is."""

    dispatch: int
    blocks: list[int]
    num_cached_blocks: int
    key: int = 0


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    dispatch: int
    reason: str


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities from the model's raw distribution: the chosen token's, then the best (id, logprob) pairs."""

    logprob: float
    top: list[tuple[int, float]]


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    dispatch: int
    token: int
    finish_reason: str | None = None  # a FinishReason on the last token
    logprobs: TokenLogprobs | None = None


class Prefilled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The prompt is computed. ``output`` is the first token, None when only the prompt was to be scored.

    ``prompt_logprobs[i]`` belongs to prompt token ``i + 1``.
    """

    dispatch: int
    output: TokenOutput | None
    num_cached_tokens: int
    prompt_logprobs: list[TokenLogprobs] | None
    queue_s: float  # waited in the worker before its first chunk
    prefill_s: float  # first chunk's start to the first token


class Pushed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """``digests``: one for each block pushed, from the target's ``num_cached_blocks`` on; empty unless they are asked for."""

    dispatch: int
    nbytes: int
    seconds: float  # spent copying
    error: str | None
    digests: list[int] = []


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to a Commit whose blocks do not hold what prefill pushed. Nothing is decoded from them.

    ``reason`` is a FailReason: what arrived differs from its digests, or did not arrive.
    """

    dispatch: int
    reason: str
    detail: str


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One message per step carries the tokens of all its requests."""

    outputs: list[TokenOutput]


class Quiesced(msgspec.Struct, frozen=True, array_like=True, tag=True):
    dispatch: int


class Stats(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Sent at least every HEARTBEAT_S between steps: proof of progress, and the worker's books.

    ``received`` counts the frames of its channel that the worker has taken: what it lacks has been lost on the way.
    """

    waiting: int
    running: int
    free: int
    reserved: int
    filling: int
    in_use: int
    cached: int
    steps: int
    decode_prefill_tokens: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    late_messages: int
    received: int = 0


HEARTBEAT_S = 0.25

ToWorker = Configure | Connect | Disconnect | Reserve | Prefill | Commit | Abort | Probe | Verify | Shutdown
ToParent = (
    Loading
    | Ready
    | StartFailed
    | Connected
    | Probed
    | Verified
    | Reserved
    | Refused
    | Prefilled
    | Pushed
    | Rejected
    | Tokens
    | Quiesced
    | Stats
)
Message = ToWorker | ToParent

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(frame: bytes | bytearray | memoryview) -> Message:
    """The message in ``frame``. Raises ProtocolError for anything that is not one."""
    try:
        message: Message = _decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a message of version {VERSION}: {error}") from error
    return message
