"""Where a request's time went: from the states that its stream passed to stages, TTFT and TPOT, and to its one line in the log.

    queue ─▶ reserve ─▶ prefill ─▶ (first token) transfer ─▶ decode, which begins with first_decode: commit to the next token

A stage can be passed more than once: after a worker is lost, everything begins again. No prompt and no text is in here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from disagg.request import RequestState
from disagg.stream import RequestStream

STAGES = {
    RequestState.QUEUED: "queue",
    RequestState.RESERVING: "reserve",
    RequestState.PREFILLING: "prefill",
    RequestState.HANDING_OFF: "transfer",
    RequestState.DECODING: "decode",
}
FIRST_DECODE = "first_decode"


class Stay(NamedTuple):
    """One time that a stream was in a state, which it has left."""

    state: RequestState
    since: float
    until: float
    attempt: int  # from 1 on; waiting for a worker belongs to the attempt that it is for
    is_lost: bool  # the attempt ended here, and another began


def stays(stream: RequestStream) -> Iterator[Stay]:
    """Where it has been. Where nothing was handed over there was no transfer."""
    attempt = 0
    for (state, since), (following, until) in itertools.pairwise(stream.entered):
        attempt += state is RequestState.QUEUED
        if state is not RequestState.HANDING_OFF or until > since:
            yield Stay(state, since, until, attempt, following is RequestState.QUEUED)


def visits(stream: RequestStream) -> Iterator[tuple[str, float]]:
    """(stage, seconds) for each time that a stage was left."""
    for stay in stays(stream):
        yield STAGES[stay.state], stay.until - stay.since
    for seconds in stream.first_decodes_s:
        yield FIRST_DECODE, seconds


def last_stage(stream: RequestStream) -> str:
    """Where a stream that has ended was when it ended."""
    return STAGES[stream.entered[-2][0]]


def ttft_s(stream: RequestStream) -> float | None:
    """Seconds from its arrival at the router to its first token; None if there was none."""
    if not stream.tokens:
        return None
    since, until = stream.entered[0][1], stream.entered[-1][1]
    return next((at for state, at in stream.entered if state is RequestState.HANDING_OFF), until) - since


def e2e_s(stream: RequestStream) -> float:
    return stream.entered[-1][1] - stream.entered[0][1]


def tpot_s(stream: RequestStream) -> float | None:
    """Mean seconds for each token after the first; None with fewer than two."""
    first_s, num_more = ttft_s(stream), len(stream.tokens) - 1
    return None if first_s is None or num_more < 1 else (e2e_s(stream) - first_s) / num_more


def timings(stream: RequestStream, num_generated: int) -> dict[str, float | None]:
    """What a client that asks for it is told with its last token, in llama.cpp's words, and below them the stages that are ours.

    ``num_generated``: the tokens that are in the answer. Cached prompt tokens are not among those computed.
    """
    stages = _totals(stream)
    first_s, whole_s = ttft_s(stream) or 0.0, e2e_s(stream)
    num_computed = len(stream.request.prompt) - stream.num_cached_tokens
    return {
        "cache_n": stream.num_cached_tokens,
        **_pace("prompt", num_computed, stages.get("prefill", 0.0)),
        **_pace("predicted", num_generated, whole_s - first_s),
        "queue_ms": round(stages.get("queue", 0.0) * 1e3, 3),
        "reserve_ms": round(stages.get("reserve", 0.0) * 1e3, 3),
        "transfer_ms": round(stages.get("transfer", 0.0) * 1e3, 3),
        "first_token_ms": round(first_s * 1e3, 3),
    }


def _pace(what: str, num_tokens: int, seconds: float) -> dict[str, float | None]:
    return {
        f"{what}_n": num_tokens,
        f"{what}_ms": round(seconds * 1e3, 3),
        f"{what}_per_token_ms": round(seconds * 1e3 / num_tokens, 3) if num_tokens else None,
        f"{what}_per_second": round(num_tokens / seconds, 3) if seconds > 0 else None,
    }


def _totals(stream: RequestStream) -> dict[str, float]:
    """Seconds by stage, over all attempts."""
    stages: dict[str, float] = {}
    for stage, seconds in visits(stream):
        stages[stage] = stages.get(stage, 0.0) + seconds
    return stages


def summary(stream: RequestStream) -> dict[str, Any]:
    """The fields of the line that is logged when a stream has ended; what does not apply is left out."""
    latest = stream.attempts[-1] if stream.attempts else None
    fields: dict[str, Any] = {
        "request": stream.request.id,
        "key": stream.key_name or None,
        "trace_id": stream.trace_id or None,
        "priority": stream.request.priority or None,
        "state": stream.state.value,
        "finish_reason": stream.finish_reason,
        "stage": None if stream.state is RequestState.FINISHED else last_stage(stream),
        "fail_reason": None if stream.error is None else stream.error.reason,
        "cause": None if stream.error is None else str(stream.error),
        "prompt_tokens": len(stream.request.prompt),
        "cached_tokens": stream.num_cached_tokens,
        "completion_tokens": len(stream.tokens),
        "attempts": stream.num_attempts,
        "prefill": latest and latest.prefill,
        "decode": latest and latest.decode,
    }
    times = {"ttft_s": ttft_s(stream), "tpot_s": tpot_s(stream), "e2e_s": e2e_s(stream)}
    times |= {f"{stage}_s": seconds for stage, seconds in _totals(stream).items()}
    fields |= {name: None if seconds is None else round(seconds, 6) for name, seconds in times.items()}
    return {name: value for name, value in fields.items() if value is not None}
