"""Real clients, as people use them, against the real server with the built-in model."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.clients import lm_eval_tasks
from tests.process.harness import Server, server

pytestmark = pytest.mark.timeout(1000)  # the first run makes the environment of the clients

MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "Can you tell me the capital of France?"}]
CLIENT_S = 120.0


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with server("--kv-memory", "512MiB") as shared:
        yield shared


def run(python: Path | str, *arguments: str, **environment: str) -> str:
    """What a client prints; its failure is the test's."""
    result = subprocess.run(
        [str(python), *arguments],
        capture_output=True,
        text=True,
        timeout=CLIENT_S,
        check=False,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def test_openai_python_in_all_its_ways(running: Server) -> None:
    """Whole, raw, streamed and stream-helper answers of the synchronous client agree; n, log-probabilities, ids, errors."""
    ask: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 16}
    with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(**ask, n=2, logprobs=True, top_logprobs=2, extra_headers={"X-Request-Id": "mine"})
        raw = client.chat.completions.with_raw_response.create(**ask, extra_headers={"X-Request-Id": "mine"})
        chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
        with client.chat.completions.stream(**ask) as helper:
            helped = helper.get_final_completion()
        with client.chat.completions.with_streaming_response.create(**ask, stream=True) as response:
            lines = list(response.iter_lines())
        text = client.completions.create(
            model=MODEL, prompt=["Paris is", "Rome is"], max_tokens=4, temperature=0.5, n=2, best_of=3, seed=1,
            logprobs=1, echo=True,
        )  # fmt: skip
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=MODEL, prompt="a", temperature=9)
    content = whole.choices[0].message.content
    assert content is not None
    assert "Paris" in content
    assert [choice.message.content for choice in whole.choices] == [content] * 2
    assert whole.choices[0].logprobs is not None
    assert "".join(entry.token for entry in whole.choices[0].logprobs.content or []) == content
    assert all(len(entry.top_logprobs) == 2 for entry in whole.choices[0].logprobs.content or [])
    assert raw.headers["X-Request-Id"] == "mine"
    assert raw.parse().choices[0].message.content == content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == content
    assert chunks[-1].usage is not None
    assert helped.choices[0].message.content == content
    assert lines[-2] == "data: [DONE]"
    assert [choice.index for choice in text.choices] == [0, 1, 2, 3]
    assert all(choice.text.startswith("Paris is" if choice.index < 2 else "Rome is") for choice in text.choices)
    assert all(choice.logprobs.token_logprobs[0] is None for choice in text.choices)


def test_openai_python_without_blocking(running: Server) -> None:
    """Eight streams of the asynchronous client at once, one of them given up in the middle: all others are whole."""
    ask: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 16, "stream": True}

    async def stream(client: openai.AsyncOpenAI, limit: int | None = None) -> str:
        text, chunks = "", await client.chat.completions.create(**ask)
        async with chunks:
            async for chunk in chunks:
                text += chunk.choices[0].delta.content or ""
                if limit is not None and len(text) >= limit:
                    break
        return text

    async def all_streams() -> list[str]:
        async with openai.AsyncOpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(stream(client, 5), *(stream(client) for _ in range(7)))

    cut, *whole = asyncio.run(all_streams())
    assert len(set(whole)) == 1
    assert whole[0].startswith(cut)
    assert len(cut) < len(whole[0])
    running.wait_until_empty(1.0)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl command")
def test_curl_shows_a_stream_as_it_comes(running: Server) -> None:
    """``curl -N`` without a content type: events one by one, then [DONE]; curl ends by itself."""
    body = json.dumps({"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 16, "stream": True})
    text = run("curl", "-sN", "--max-time", "60", running.url + "/v1/chat/completions", "-d", body)
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert events[-1] == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert "Paris" in "".join(deltas)


def test_langchain(running: Server, clients: Path) -> None:
    """ChatOpenAI: the streamed text is the whole one, with usage; a batch goes in parallel."""
    script = Path(lm_eval_tasks.__file__).with_name("langchain_chat.py")
    got = json.loads(run(clients, str(script), running.url + "/v1", MODEL))
    assert "Paris" in got["whole"]
    assert got["streamed"] == got["whole"]
    assert got["num_chunks"] > 3
    assert got["usage"]["output_tokens"] == got["stream_usage"]["output_tokens"] > 0
    assert len(got["batch"]) == 2
    assert all(got["batch"])


def test_litellm(running: Server, clients: Path) -> None:
    """LiteLLM: chat whole and streamed, raw text, and its own class for a refusal."""
    script = Path(lm_eval_tasks.__file__).with_name("litellm_chat.py")
    got = json.loads(run(clients, str(script), running.url + "/v1", MODEL, LITELLM_LOCAL_MODEL_COST_MAP="True"))
    assert "Paris" in got["whole"]
    assert got["streamed"] == got["whole"]
    assert got["usage"] == got["stream_usage"] > 0
    assert got["text"]
    assert "temperature" in got["refusal"]


def test_simon_willisons_llm(running: Server, clients: Path, tmp_path: Path) -> None:
    """``llm`` with the server as an extra OpenAI model, streaming and not, prints the same answer."""
    model = {"model_id": "here", "model_name": MODEL, "api_base": running.url + "/v1"}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]), encoding="utf-8")  # JSON is YAML
    ask = ["-m", "llm", "prompt", "-m", "here", "-o", "temperature", "0", "-o", "max_tokens", "16", "--no-log"]
    question = QUESTION[0]["content"]
    streamed = run(clients, *ask, question, LLM_USER_PATH=str(tmp_path))
    whole = run(clients, *ask, "--no-stream", question, LLM_USER_PATH=str(tmp_path))
    assert "Paris" in streamed
    assert streamed == whole


def evaluate(python: Path, base_url: str, folder: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """lm-eval's metrics and, for each task, the responses to its requests."""
    folder.mkdir()
    lm_eval_tasks.write(folder)
    arguments = f"model={MODEL},base_url={base_url}/v1/completions,tokenizer_backend=remote,num_concurrent=4,max_retries=1"
    run(
        python,
        *("-m", "lm_eval", "run", "--model", "local-completions", "--model_args", arguments),
        *("--tasks", "disagg_choice,disagg_generation", "--include_path", str(folder)),
        *("--output_path", str(folder / "out"), "--log_samples"),
        HF_HOME=str(folder / "hub"),
        HF_HUB_OFFLINE="1",
        OPENAI_API_KEY="none",
    )
    results = json.loads(next((folder / "out").rglob("results_*.json")).read_text())["results"]
    responses = {}
    for task in ("disagg_choice", "disagg_generation"):
        lines = next((folder / "out").rglob(f"samples_{task}_*.jsonl")).read_text().splitlines()
        responses[task] = [each[0] for line in lines for each in json.loads(line)["resps"]]
    return results, responses


@pytest.mark.slow
def test_lm_eval_gets_the_same_numbers_colocated_and_disaggregated(running: Server, clients: Path, tmp_path: Path) -> None:
    """Log-likelihoods of multiple choices and generations through the remote tokenizer, from both kinds of server."""
    with server("--mode", "colocated", "--kv-memory", "512MiB") as colocated, ThreadPoolExecutor(2) as pool:
        folders = (tmp_path / "disaggregated", tmp_path / "colocated")
        urls = (running.url, colocated.url)
        (results, responses), (expected_results, expected) = pool.map(lambda *where: evaluate(clients, *where), urls, folders)
    for name, metric in (("disagg_choice", "acc,none"), ("disagg_generation", "exact_match,none")):
        assert results[name][metric] == expected_results[name][metric]
    assert results["disagg_choice"]["acc,none"] >= 0.5  # the model knows most of these: the numbers mean something
    assert responses["disagg_generation"] == expected["disagg_generation"]
    likelihoods, is_greedy = zip(*responses["disagg_choice"])
    expected_likelihoods, expected_greedy = zip(*expected["disagg_choice"])
    assert is_greedy == expected_greedy
    assert [float(each) for each in likelihoods] == pytest.approx([float(each) for each in expected_likelihoods], abs=1e-3)
    assert len(likelihoods) == sum(len(choices) for _, choices in lm_eval_tasks.QUESTIONS)
