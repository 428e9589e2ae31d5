"""Typed body → requests that nothing downstream may reject. Whatever is wrong is said here, before any work."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from disagg.api.choice import TextOptions
from disagg.api.services import Services
from disagg.api.structured import Form
from disagg.api.tools import ToolUse
from disagg.api.types import MAX_CHOICES, SharedFields
from disagg.errors import InvalidRequestError
from disagg.request import Request, SamplingParams

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024  # characters; matching costs time in proportion to it, for every token
MAX_BIASES = 1024  # each travels with every choice
_SEED_MASK = 2**63 - 1
_GREEDY_BELOW = 1e-5  # logits divided by less overflow float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One client request, ready to be submitted. Request ``i`` belongs to prompt ``i // num_drawn``."""

    id: str
    requests: list[Request]
    n: int  # choices that each prompt is answered with
    num_drawn: int  # made of each prompt: more than ``n`` where the best of them are the answer
    num_logprobs: int | None  # written beside the text; None = none
    options: TextOptions
    echo: list[str] | None = None  # the text of each prompt, to be given back
    is_streamed: bool
    form: Form | None = None  # of the answers, not compiled yet
    include_usage: bool
    continuous_usage: bool
    has_timings: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one endpoint makes of its own fields: how long an answer may be and which log-probabilities come with it."""

    max_tokens: int | None  # None: ``default_max_tokens``, or less where the context ends
    default_max_tokens: int | None  # None: the rest of the context
    prompt_field: str = "prompt"  # named when it is too long
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    best_of: int | None = None
    logs_stop_token: bool = False
    continues: bool = False  # the answer goes on in the middle of the client's own text
    form: Form | None = None
    tools: ToolUse | None = None


def check_shared(body: SharedFields, services: Services) -> None:
    """Everything about the shared fields that needs no prompt. Raises InvalidRequestError."""
    check_model(body.model, services)
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "only allowed with stream: true")
    check_ids("stop_token_ids", body.stop_token_ids or (), services)
    biases = body.logit_bias or {}
    if len(biases) > MAX_BIASES:
        raise invalid("logit_bias", f"at most {MAX_BIASES} tokens are allowed")
    check_ids("logit_bias", biases, services)


def check_model(model: str | None, services: Services) -> None:
    if model is not None and model != services.model_name:
        message = f"this server has only the model '{services.model_name}'"
        raise InvalidRequestError(message, param="model", code="model_not_found", status=404)


def check_num_choices(num_prompts: int, n: int) -> None:
    if num_prompts * n > MAX_CHOICES:
        raise invalid("n", f"at most {MAX_CHOICES} choices (prompts × n) are allowed, this asks for {num_prompts * n}")


def build_work(
    id: str, body: SharedFields, services: Services, prompts: Sequence[list[int]], answer: Answer, echo: list[str] | None = None
) -> Work:
    """One Request per choice, prompt by prompt. Raises InvalidRequestError."""
    n = body.n or 1
    num_drawn = answer.best_of or n
    first_seed = secrets.randbits(63) if body.seed is None else body.seed
    ends = () if body.ignore_eos else services.tokenizer.eos_token_ids
    own_ends = dict.fromkeys(body.stop_token_ids or ())
    common = _sampling(body, services, answer, stop_token_ids=tuple({**own_ends, **dict.fromkeys(ends)}))
    if num_drawn > n and answer.num_logprobs is None:  # the best are known by their log-probabilities
        common = msgspec.structs.replace(common, num_logprobs=0)
    requests: list[Request] = []
    for prompt in prompts:
        check_ids("prompt", prompt, services)
        max_tokens = _max_tokens(len(prompt), answer, services.max_model_len)
        if common.min_tokens > max_tokens:
            raise invalid("min_tokens", f"{common.min_tokens} is more than the {max_tokens} tokens that may be generated")
        for choice in range(num_drawn):  # a prompt draws the same alone and in a list
            params = msgspec.structs.replace(common, max_tokens=max_tokens, seed=(first_seed + choice) & _SEED_MASK)
            requests.append(Request(id=f"{id}-{len(requests)}", prompt=prompt, params=params, priority=body.priority or 0))
    if body.timings and len(requests) > 1:
        raise invalid("timings", "only allowed with one choice")
    return Work(
        id=id,
        requests=requests,
        n=n,
        num_drawn=num_drawn,
        num_logprobs=answer.num_logprobs,
        options=TextOptions(
            stop=_stops(body.stop),
            stop_token_ids=frozenset(own_ends).difference(ends),
            skip_special_tokens=body.skip_special_tokens is not False,
            return_token_ids=bool(body.return_token_ids),
            logs_stop_token=answer.logs_stop_token,
            continues=answer.continues,
            tools=answer.tools,
        ),
        echo=echo,
        form=answer.form,
        is_streamed=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        continuous_usage=bool(body.stream_options and body.stream_options.continuous_usage_stats),
        has_timings=bool(body.timings),
    )


def _sampling(body: SharedFields, services: Services, answer: Answer, *, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """What all choices have in common: everything but the seed and the length."""
    return SamplingParams(
        max_tokens=0,
        min_tokens=body.min_tokens or 0,
        temperature=_temperature(body.temperature),
        top_k=_top_k(body.top_k, services.vocab_size),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=body.logit_bias or {},
        stop_token_ids=stop_token_ids,
        num_logprobs=answer.num_logprobs,
        num_prompt_logprobs=answer.num_prompt_logprobs,
        grammar=None if answer.form is None else answer.form.grammar,
    )


def _max_tokens(num_prompt: int, answer: Answer, max_model_len: int) -> int:
    if num_prompt == 0:
        raise invalid(answer.prompt_field, "the prompt is empty")
    room = max_model_len - num_prompt
    wanted = 1 if answer.max_tokens is None else answer.max_tokens
    if wanted > room:
        raise InvalidRequestError(
            f"this model's maximum context length is {max_model_len} tokens, but {num_prompt + wanted} were requested "
            f"({num_prompt} in the prompt, at least {wanted} for the answer)",
            param=answer.prompt_field,
            code="context_length_exceeded",
        )
    if answer.max_tokens is not None:
        return answer.max_tokens
    return room if answer.default_max_tokens is None else min(answer.default_max_tokens, room)


def _temperature(temperature: float | None) -> float:
    if temperature is None:
        return 1.0
    return 0.0 if temperature < _GREEDY_BELOW else temperature


def _top_k(top_k: int | None, vocab_size: int) -> int:
    """0 = off, also for the −1 that other servers use and for more than there is to choose from."""
    return top_k if top_k is not None and 0 < top_k < vocab_size else 0


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"at most {MAX_STOPS} strings are allowed")
    if not all(stops):
        raise invalid("stop", "an empty string would match at once")
    if any(len(string) > MAX_STOP_LENGTH for string in stops):
        raise invalid("stop", f"a string may have at most {MAX_STOP_LENGTH} characters")
    return stops


def check_ids(param: str, ids: Iterable[int], services: Services) -> None:
    vocab_size = services.vocab_size
    if any(not 0 <= token < vocab_size for token in ids):
        raise invalid(param, f"token ids go from 0 to {vocab_size - 1}")


def mint_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def invalid(param: str, sentence: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {sentence}", param=param, code="invalid_value")


def unsupported(param: str, sentence: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {sentence}", param=param, code="unsupported_value")
