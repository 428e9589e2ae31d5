"""disagg verify: the same prompts every time, a planted difference found where it is, and the exit code that follows."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg import cli, verify
from disagg.config import Config, KVConfig, SchedulerConfig
from disagg.errors import ConfigError, StartupError
from disagg.verify import Difference, Report, Token, find_differences, make_prompts

CONFIG = Config(kv=KVConfig(block_size=4), scheduler=SchedulerConfig(chunk_tokens=16))
RUN = [[Token(10 * prompt + position, -0.5) for position in range(5)] for prompt in range(3)]


def report(**fields: Any) -> Report:
    none: dict[str, Any] = {
        "seed": 7, "kinds": ["text, greedy"] * 3, "control": [], "disaggregated": [],
        "handed_over_nbytes": 1, "corrupted_blocks": 0, "recomputed_tokens": 0,
    }  # fmt: skip
    return Report(**{**none, **fields})


# ------------------------------------------------------------------------------------------------ the comparison


@given(st.integers(0, 2), st.integers(0, 4), st.integers(1, 9))
def test_a_planted_difference_is_found_where_it_is(prompt: int, position: int, by: int) -> None:
    """One changed token: its prompt, its place, both tokens with their logprobs; exit code 1."""
    got = [list(answer) for answer in RUN]
    got[prompt][position] = Token(got[prompt][position].id + by, -1.5)
    (found,) = find_differences(RUN, got)
    assert found == Difference(prompt, position, RUN[prompt][position], got[prompt][position])
    assert report(disaggregated=[found]).exit_code == 1


def test_equal_tokens_are_equal_whatever_their_logprobs() -> None:
    """The last bits of a logit may differ between batches and are not compared."""
    got = [[Token(token.id, token.logprob - 1e-6) for token in answer] for answer in RUN]
    assert find_differences(RUN, got) == []
    assert report().exit_code == 0


def test_an_answer_that_ends_early_or_goes_on_differs() -> None:
    """A lost token and a doubled one are differences at the place where one answer has no token."""
    short, long = [RUN[0][:3], *RUN[1:]], [*RUN[:2], [*RUN[2], Token(1, 0.0)]]
    assert find_differences(RUN, short) == [Difference(0, 3, RUN[0][3], None)]
    assert find_differences(RUN, long) == [Difference(2, 5, None, Token(1, 0.0))]


def test_a_run_that_lacks_a_prompt_is_not_compared() -> None:
    """It would look equal for the rest."""
    with pytest.raises(ValueError, match="shorter"):
        find_differences(RUN, RUN[:2])


@pytest.mark.parametrize(
    ("control", "disaggregated", "exit_code"),
    [
        ([], [], 0),
        ([(1, 3)], [], 0),
        ([(1, 3)], [(1, 3)], 0),
        ([(1, 3)], [(1, 4)], 0),
        ([(1, 3)], [(1, 2)], 1),
        ([(1, 3)], [(2, 3)], 1),
        ([(1, 3)], [(1, 3), (2, 0)], 1),
    ],
)
def test_only_what_goes_beyond_the_control_counts(
    control: Sequence[tuple[int, int]], disaggregated: Sequence[tuple[int, int]], exit_code: int
) -> None:
    """Where the control has left the first run already, so may the disaggregated one; earlier or elsewhere it may not."""
    found = [[Difference(*place, Token(1, 0.0), Token(2, 0.0)) for place in places] for places in (control, disaggregated)]
    assert report(control=found[0], disaggregated=found[1]).exit_code == exit_code


def test_a_corrupted_block_is_a_difference_although_the_text_is_right() -> None:
    """It was sent again, so no token tells; the path is broken all the same."""
    corrupted = report(corrupted_blocks=1)
    assert corrupted.exit_code == 1
    assert [*verify.lines(corrupted)][-1].startswith("NOT VERIFIED (seed 7)")


def test_the_table_shows_the_first_difference() -> None:
    """Prompt, kind, place, both tokens and their logprobs, and that it does not pass."""
    found = Difference(1, 2, Token(12, -0.25), None)
    text = "\n".join(verify.lines(report(kinds=["random ids, greedy", "text, greedy", "text, greedy"], disaggregated=[found])))
    rows = [line.split()[-2:] for line in text.splitlines()[1:4]]
    assert rows == [["1/1", "1/1"], ["2/2", "1/2"], ["3/3", "2/3"]]
    assert "disaggregated first differs in prompt 1 (text, greedy) at token 2:" in text
    assert "colocated 12 (logprob -0.2500), disaggregated had ended" in text
    assert "NOT EQUAL (seed 7): prompts that differ beyond the control: 1" in text


# ------------------------------------------------------------------------------------------------ the prompts


def prompts(count: int = 24, max_model_len: int = 200, seed: int = 0) -> list[verify.Prompt]:
    return make_prompts(CONFIG, count=count, num_tokens=8, vocab_size=259, max_model_len=max_model_len, seed=seed)


def test_prompts_are_of_all_kinds_and_cross_blocks_and_chunks() -> None:
    """Ids and text, greedy and sampled; one below, at and above a block's and a chunk's border; more than two chunks."""
    made = prompts()
    assert {prompt.kind for prompt in made[:6]} == {f"{x}, {y}" for x in ("random ids", "text") for y in ("greedy", "sampled")}
    ids = [prompt.fields["prompt"] for prompt in made if prompt.kind.startswith("random")]
    lengths = {len(one) for one in ids}
    assert lengths >= {5, 17, 4, 34, 16, 12}
    assert {token for one in ids for token in one} <= set(range(259))
    assert len({prompt.fields["seed"] for prompt in made}) == len(made)


def test_prompts_depend_on_the_seed_only() -> None:
    """What has been found can be found again."""
    assert prompts(seed=3) == prompts(seed=3)
    assert prompts(seed=3) != prompts(seed=4)
    assert prompts(count=5, seed=3) == prompts(count=9, seed=3)[:5]


@given(st.integers(10, 60), st.integers(0, 2**63))
def test_prompts_fit_the_context(max_model_len: int, seed: int) -> None:
    """Prompt + answer: as ids they are counted, as text no tokenizer makes more tokens than bytes and one that begins it."""
    sizes = [
        len(prompt.fields["prompt"].encode()) + 1 if prompt.kind.startswith("text") else len(prompt.fields["prompt"])
        for prompt in prompts(max_model_len=max_model_len, seed=seed)
    ]
    assert all(1 <= size <= max(2, max_model_len - 8) for size in sizes)


@pytest.mark.parametrize("max_model_len", [8, 9])
def test_no_room_for_a_prompt_is_an_error(max_model_len: int) -> None:
    """Both numbers are in the message."""
    with pytest.raises(ConfigError, match=rf"--tokens 8: .* {max_model_len} tokens"):
        prompts(max_model_len=max_model_len)


# ------------------------------------------------------------------------------------------------ the command


@dataclass
class Stand:
    """Stands in for the servers: answers in the way of the API; the last one differs as the test says."""

    url: str = ""
    arguments: Sequence[str] = ()
    is_disaggregated: bool = False
    changed_token: int = 0  # added to the third token of every answer, when disaggregated
    transfer_nbytes: int = 4096


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    state = Stand()

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nbytes = state.transfer_nbytes if state.is_disaggregated else 0
            self.answer(
                {
                    "/v1/models": {"data": [{"id": "m", "max_model_len": 100}]},
                    "/v1/disagg/status": {"workers": [{"decode_prefill_tokens": 0}]},
                    "/metrics": f'disagg_transfer_bytes_total{{transport="shm"}} {nbytes}.0\ndisagg_corrupted_blocks_total 0.0\n',
                }[self.path]
            )

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            ids = [(len(body["prompt"]) + index) % 50 for index in range(body["max_tokens"])]
            ids[2] += state.changed_token if state.is_disaggregated else 0
            self.answer({"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": [-1.0] * len(ids)}}]})

        def answer(self, content: Any) -> None:
            payload = (content if isinstance(content, str) else json.dumps(content)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    @contextmanager
    def local_server(arguments: Sequence[str], notices: Any) -> Iterator[Stand]:
        state.is_disaggregated = "--mode=disagg" in arguments
        yield state

    http = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    state.url = f"http://127.0.0.1:{http.server_port}"
    monkeypatch.setattr(verify, "local_server", local_server)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield state
    http.shutdown()
    thread.join()
    http.server_close()


ARGV = ["verify", "--model", "null", "--prompts", "4", "--tokens", "5", "--chunk-tokens", "16"]


@pytest.mark.parametrize("changed_token", [0, 1])
def test_the_exit_code_is_the_verdict(stand: Stand, capsys: pytest.CaptureFixture[str], changed_token: int) -> None:
    """0 when all three runs agree, 1 when the disaggregated one says another token; the table goes to stdout alone."""
    stand.changed_token = changed_token
    assert cli.main(ARGV) == changed_token
    out, err = capsys.readouterr()
    assert ("NOT EQUAL" in out) == bool(changed_token)
    assert ("disaggregated first differs in prompt 0 (random ids, greedy) at token 2:" in out) == bool(changed_token)
    assert "colocated: 4 prompts answered" in err


def test_json_has_everything(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    """For machines: the verdict, every difference, and the numbers of the hand-over."""
    stand.changed_token = 1
    assert cli.main([*ARGV, "--json", "--seed", "5"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["equal"], document["seed"], document["handed_over_nbytes"]) == (False, 5, 4096)
    assert [difference["prompt"] for difference in document["disaggregated"]] == [0, 1, 2, 3]
    first = document["disaggregated"][0]
    assert (first["position"], first["got"]["id"] - first["colocated"]["id"], document["control"]) == (2, 1, [])


def test_a_run_without_any_hand_over_proves_nothing(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal answers of a server that moved no byte are no pass."""
    stand.transfer_nbytes = 0
    assert cli.main(ARGV) == 1
    assert "handed nothing over" in capsys.readouterr().err


def test_a_server_that_cannot_start_is_exit_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither equal nor different: the reason is on stderr."""

    def local_server(arguments: Sequence[str], notices: Any) -> None:
        raise StartupError("the server did not start: no room")

    monkeypatch.setattr(verify, "local_server", local_server)
    assert cli.main(ARGV) == 2
    assert "no room" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--mode", "disagg"], "--mode: set by verify itself"),
        (["--no-verify-kv"], "--verify-kv: set by verify itself"),
        (["--prompts", "0"], "at least 1 prompt"),
        (["--tokens", "1"], "2 tokens"),
    ],
)
def test_wrong_usage_is_exit_code_2(extra: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What verify decides itself, and runs that could show nothing, are refused before a server starts."""
    assert cli.main([*ARGV, *extra]) == 2
    assert message in capsys.readouterr().err
