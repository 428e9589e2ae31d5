"""A request: what was asked, and the table of states it passes.

    QUEUED ──reserve──▶ RESERVING ──prefill──▶ PREFILLING ──first_token──▶ HANDING_OFF ──commit──▶ DECODING ──finish──▶ FINISHED
       ▲                    │                      │                           │                      │
       └───────────────────────────────── retry: a worker was lost ─────────────────────────────┘

A colocated request skips RESERVING and HANDING_OFF moves nothing. Every state that is not final can also end by
``abort`` (client or operator), ``fail`` (we could not) or, with one token asked for, ``finish``.

Pure data: no I/O, no clock, no task. The router, the roles and the simulation use the same table.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

import msgspec

from disagg.errors import IllegalTransitionError

State = TypeVar("State", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)


def advance(table: Mapping[State, Mapping[Event, State]], state: State, event: Event) -> State:
    """The state that follows ``event``. Raises IllegalTransitionError, changing nothing, when the table has no such move."""
    try:
        return table[state][event]
    except KeyError:
        raise IllegalTransitionError(f"{type(state).__name__} {state}: no move for {event}") from None


class RequestState(StrEnum):
    QUEUED = "queued"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    HANDING_OFF = "handing_off"
    DECODING = "decoding"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"


class RequestEvent(StrEnum):
    RESERVE = "reserve"
    PREFILL = "prefill"
    FIRST_TOKEN = "first_token"
    COMMIT = "commit"
    FINISH = "finish"
    ABORT = "abort"
    RETRY = "retry"
    FAIL = "fail"


_ENDINGS = {RequestEvent.ABORT: RequestState.ABORTED, RequestEvent.FAIL: RequestState.FAILED}
_SETBACKS = {RequestEvent.RETRY: RequestState.QUEUED, **_ENDINGS}

REQUEST_TABLE: Mapping[RequestState, Mapping[RequestEvent, RequestState]] = {
    RequestState.QUEUED: {
        RequestEvent.RESERVE: RequestState.RESERVING,
        RequestEvent.PREFILL: RequestState.PREFILLING,
        RequestEvent.FINISH: RequestState.FINISHED,  # a stop string in what an earlier attempt had generated
        **_ENDINGS,
    },
    RequestState.RESERVING: {
        RequestEvent.PREFILL: RequestState.PREFILLING,
        RequestEvent.FINISH: RequestState.FINISHED,
        **_SETBACKS,
    },
    RequestState.PREFILLING: {
        RequestEvent.FIRST_TOKEN: RequestState.HANDING_OFF,
        RequestEvent.FINISH: RequestState.FINISHED,
        **_SETBACKS,
    },
    RequestState.HANDING_OFF: {
        RequestEvent.COMMIT: RequestState.DECODING,
        RequestEvent.FINISH: RequestState.FINISHED,
        **_SETBACKS,
    },
    RequestState.DECODING: {RequestEvent.FINISH: RequestState.FINISHED, **_SETBACKS},
    RequestState.FINISHED: {},
    RequestState.ABORTED: {},
    RequestState.FAILED: {},
}


class FinishReason(StrEnum):
    """Why a worker ended a sequence. STOP and LENGTH are OpenAI's words; ERROR (no token could be sampled) fails the request."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


class FailReason(StrEnum):
    """Why an admitted request could not be finished."""

    WORKER_DIED = "worker_died"
    NO_BLOCKS = "no_blocks"
    TIMEOUT = "timeout"
    HANDOFF = "handoff_failed"
    CORRUPTED = "kv_corrupted"
    BROKEN_OUTPUT = "broken_output"
    SHUTDOWN = "shutdown"
    ABORTED = "aborted"  # by an operator


FIRST_PRIORITY, LAST_PRIORITY = -(2**31), 2**31 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How tokens are drawn. Validated before it exists; identical on prefill and decode.

    Draws use a counter-based generator keyed by (``seed``, position), so they do not depend on batch, chunks, preemption
    or worker. ``seed`` is always set: a client that gives none gets a random one, once, in the parent.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence ids included, unless the client ignores them
    num_logprobs: int | None = None  # None = off; 0 = the chosen token's only; k = also the k best
    num_prompt_logprobs: int | None = None  # the same for every prompt position (turns prefix hits off)
    grammar: str | None = None  # what may be generated, as disagg.grammar writes it; what ends the answer is no part of it


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of one client request, ready to be scheduled: nothing downstream may reject it.

    Wherever requests wait, those with a lower ``priority`` go first, whoever starves, and among equals those that came first.
    What is running goes on.

    ``prompt``: token ids, at least 1. ``prompt`` + ``params.max_tokens`` fits the model's context. ``params.max_tokens`` is 0
    only together with ``num_prompt_logprobs``: the prompt is scored and nothing is generated.
    """

    id: str  # for logs and answers; never a key
    prompt: list[int]
    params: SamplingParams
    priority: int = 0  # FIRST_PRIORITY to LAST_PRIORITY
