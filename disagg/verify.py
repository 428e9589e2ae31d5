"""``disagg verify``: proves, with the operator's own model and settings, that disaggregated output equals colocated output.

The same prompts run on three servers, one after the other:

    colocated ─▶ colocated again: the control, which shows what differs without any hand-over ─▶ disaggregated, KV digested

A prompt counts against disaggregation where its tokens leave the first run's earlier than the control's do, and so does
every KV block that did not arrive as it was sent. Prompts are sent one at a time: what else shares a batch may move the last
bits of a logit, and is no part of the question.
"""

from __future__ import annotations

import http.client
import itertools
import random
import sys
import urllib.parse
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress

from disagg.chat import local_server
from disagg.config import Config
from disagg.errors import ConfigError, DisaggError, StartupError
from disagg.model import find_model, read_model_spec
from disagg.text.tokenizer import load_tokenizer

ANSWER_TIMEOUT_S = 600.0
COLOCATED = ["--mode=colocated"]
DISAGGREGATED = ["--mode=disagg", "--verify-kv", "--no-fallback"]  # without fallback nothing is served but by a hand-over
_SAMPLED = {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.5}  # a draw's place and a token's count must travel too
_TEXT = (
    "A prompt is read once and answered word by word. Reading wants all the arithmetic there is; answering wants memory that is "
    "fast, over and over. So the two are kept apart, and what the reader remembers is carried over to the one who answers: keys "
    "and values, block by block, 16 or 32 tokens in each. Nothing of it may change on the way — not a bit. If it did, the café "
    'in the story could become a castle, and def f(x): return x + 1 a riddle. Then {"ok": true} would be a lie. '
)


class VerifyError(DisaggError):
    """The comparison could not be made: a server failed in the middle of it, or handed nothing over."""


class Prompt(msgspec.Struct, frozen=True):
    kind: str  # a row of the table
    fields: dict[str, Any]  # of the request


class Token(msgspec.Struct, frozen=True):
    id: int
    logprob: float


class Difference(msgspec.Struct, frozen=True):
    """Where one prompt's answer first leaves the colocated one. None: the answer had ended."""

    prompt: int
    position: int  # of the token in the answer
    colocated: Token | None
    got: Token | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome. ``control`` and ``disaggregated`` hold one Difference for each prompt whose answers differ."""

    seed: int
    kinds: list[str]  # of each prompt
    control: list[Difference]
    disaggregated: list[Difference]
    handed_over_nbytes: int
    corrupted_blocks: int  # found by their digests, and sent again
    recomputed_tokens: int  # computed by decode a second time

    @property
    def beyond_control(self) -> list[Difference]:
        """What cannot be laid to the engine: the control agrees with the first run there, or for longer."""
        noise = {difference.prompt: difference.position for difference in self.control}
        return [one for one in self.disaggregated if one.position < noise.get(one.prompt, sys.maxsize)]

    @property
    def exit_code(self) -> int:
        return 1 if self.beyond_control or self.corrupted_blocks else 0


def run(config: Config, serve_arguments: Sequence[str], *, num_prompts: int, num_tokens: int, seed: int, as_json: bool) -> int:
    """Run, print and return the exit code: 0 equal, 1 not equal, 2 a server could not start.

    ``config`` is what ``serve_arguments`` come to. Raises ConfigError, and VerifyError when there is no result.
    """
    if num_prompts < 1 or num_tokens < 2:
        raise ConfigError("at least 1 prompt and 2 tokens: an answer of one token is never handed over")
    notices = Console(stderr=True, highlight=False)
    try:
        report = _measure(config, serve_arguments, num_prompts, num_tokens, seed, notices)
    except StartupError as error:
        sys.stderr.write(f"disagg: error: {error}\n")
        return 2
    if as_json:
        document = {"equal": report.exit_code == 0, **msgspec.to_builtins(report)}
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    else:
        sys.stdout.write("\n".join(lines(report)) + "\n")
    return report.exit_code


def make_prompts(config: Config, *, count: int, num_tokens: int, vocab_size: int, max_model_len: int, seed: int) -> list[Prompt]:
    """Random ids and, every third, text; every other one sampled. Lengths first go over the borders of blocks and chunks.

    Equal for equal arguments. Raises ConfigError when an answer leaves no room for a prompt.
    """
    longest = max_model_len - num_tokens
    if longest < 2:
        raise ConfigError(f"--tokens {num_tokens}: the longest prompt + answer is {max_model_len} tokens")
    rng = random.Random(seed)
    block, chunk = config.kv.block_size, config.scheduler.chunk_tokens
    borders = [block + 1, chunk + 1, block // 2, block, 2 * chunk + block // 2, block - 1, chunk, 3 * block, chunk - 1, 1]
    prompts = []
    for index in range(count):
        length = borders[index] if index < len(borders) else rng.randint(1, 2 * chunk)
        length = max(1, min(length, longest))
        is_text, is_sampled = index % 3 == 2, index % 2 == 1
        fields = {
            "prompt": _text(rng, length) if is_text else rng.choices(range(vocab_size), k=length),
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "seed": seed + index,
            **(_SAMPLED if is_sampled else {"temperature": 0}),
            "logprobs": 0,
            "return_token_ids": True,
        }
        prompts.append(Prompt(f"{'text' if is_text else 'random ids'}, {'sampled' if is_sampled else 'greedy'}", fields))
    return prompts


def find_differences(colocated: Sequence[Sequence[Token]], got: Sequence[Sequence[Token]]) -> list[Difference]:
    """Compares token ids, prompt by prompt. Raises ValueError when the runs have different numbers of prompts."""
    differences = []
    for prompt, answers in enumerate(zip(colocated, got, strict=True)):
        for position, (one, other) in enumerate(itertools.zip_longest(*answers)):
            if one is None or other is None or one.id != other.id:
                differences.append(Difference(prompt, position, one, other))
                break
    return differences


def lines(report: Report) -> Iterable[str]:
    """The table for people, and where the first differences are."""
    runs = {"control": report.control, "disaggregated": report.disaggregated}
    yield f"{'equal to colocated':22}" + "".join(f"{name:>15}" for name in runs)
    for kind in [*dict.fromkeys(report.kinds), "all"]:
        members = {index for index, one in enumerate(report.kinds) if kind in (one, "all")}
        equal = [len(members - {difference.prompt for difference in found}) for found in runs.values()]
        yield f"{kind:22}" + "".join(f"{f'{count}/{len(members)}':>15}" for count in equal)
    yield ""
    for name, found in runs.items():
        if found:
            first = found[0]
            yield f"{name} first differs in prompt {first.prompt} ({report.kinds[first.prompt]}) at token {first.position}:"
            yield f"    colocated {_show(first.colocated)}, {name} {_show(first.got)}"
    yield (
        f"handed over {report.handed_over_nbytes:,} bytes; corrupted blocks: {report.corrupted_blocks}; "
        f"tokens computed twice: {report.recomputed_tokens}"
    )
    if report.exit_code == 0:
        yield f"verified with {len(report.kinds)} prompts (seed {report.seed})"
    elif report.beyond_control:
        prompts = ", ".join(str(difference.prompt) for difference in report.beyond_control)
        yield f"NOT EQUAL (seed {report.seed}): prompts that differ beyond the control: {prompts}"
    else:
        yield f"NOT VERIFIED (seed {report.seed}): the text is right only because corrupted blocks were sent again"


def _show(token: Token | None) -> str:
    return "had ended" if token is None else f"{token.id} (logprob {token.logprob:.4f})"


def _text(rng: random.Random, length: int) -> str:
    """Text of at most ``length`` tokens, the one that begins every prompt included: no tokenizer makes more tokens than bytes."""
    begin = rng.choice(
        [0, *(index + 1 for index, letter in enumerate(_TEXT[:-1]) if letter == " " and _TEXT[index + 1].isascii())]
    )
    whole = (_TEXT[begin:] + _TEXT * (length // len(_TEXT) + 1)).encode()
    return whole[: max(1, length - 1)].decode(errors="ignore")


# ------------------------------------------------------------------------------------------------ three servers


class _Model(msgspec.Struct):
    max_model_len: int


class _Models(msgspec.Struct):
    data: list[_Model]


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float]


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Logprobs


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class _Worker(msgspec.Struct):
    decode_prefill_tokens: int


class _Status(msgspec.Struct):
    workers: list[_Worker]


def _measure(
    config: Config, serve_arguments: Sequence[str], num_prompts: int, num_tokens: int, seed: int, notices: Console
) -> Report:
    files = find_model(config.model.path)
    vocab_size = min(read_model_spec(files).vocab_size, load_tokenizer(files).vocab_size)
    with local_server([*serve_arguments, *COLOCATED], notices) as server:
        (model,) = msgspec.json.decode(_ask(server.url, "GET", "/v1/models"), type=_Models).data
        prompts = make_prompts(
            config,
            count=num_prompts,
            num_tokens=num_tokens,
            vocab_size=vocab_size,
            max_model_len=model.max_model_len,
            seed=seed,
        )
        colocated = _answers(server.url, prompts, "colocated", notices)
    with local_server([*serve_arguments, *COLOCATED], notices) as server:
        control = _answers(server.url, prompts, "control", notices)
    with local_server([*serve_arguments, *DISAGGREGATED], notices) as server:
        disaggregated = _answers(server.url, prompts, "disaggregated", notices)
        metrics = _ask(server.url, "GET", "/metrics").decode()
        status = msgspec.json.decode(_ask(server.url, "GET", "/v1/disagg/status"), type=_Status)
    handed_over_nbytes = _total(metrics, "disagg_transfer_bytes_total")
    if not handed_over_nbytes:
        raise VerifyError("the disaggregated server handed nothing over, so nothing has been verified")
    return Report(
        seed=seed,
        kinds=[prompt.kind for prompt in prompts],
        control=find_differences(colocated, control),
        disaggregated=find_differences(colocated, disaggregated),
        handed_over_nbytes=handed_over_nbytes,
        corrupted_blocks=_total(metrics, "disagg_corrupted_blocks_total"),
        recomputed_tokens=sum(worker.decode_prefill_tokens for worker in status.workers),
    )


def _answers(url: str, prompts: Sequence[Prompt], name: str, notices: Console) -> list[list[Token]]:
    answers = []
    with Progress(console=notices, transient=True, disable=not notices.is_terminal) as progress:
        for prompt in progress.track(prompts, description=name):
            body = _ask(url, "POST", "/v1/completions", msgspec.json.encode(prompt.fields))
            (choice,) = msgspec.json.decode(body, type=_Completion).choices
            answers.append([Token(*pair) for pair in zip(choice.token_ids, choice.logprobs.token_logprobs, strict=True)])
    notices.print(f"{name}: {len(answers)} prompts answered", style="dim")
    return answers


def _ask(url: str, method: str, path: str, body: bytes | None = None) -> bytes:
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=ANSWER_TIMEOUT_S)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            answer = response.read()
            if response.status != 200:
                raise VerifyError(f"{method} {path}: HTTP {response.status}: {answer[:500].decode(errors='replace')}")
            return answer
    except (OSError, http.client.HTTPException) as error:
        raise VerifyError(f"{method} {path}: the server does not answer: {error}") from error
    finally:
        connection.close()


def _total(metrics: str, name: str) -> int:
    """The sum of a counter's samples, over all labels."""
    samples = (line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith((f"{name} ", f"{name}{{")))
    return int(sum(float(value) for _, value in samples))
