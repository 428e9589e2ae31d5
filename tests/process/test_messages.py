"""/v1/messages through the real command, as Anthropic's own client uses it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import jsonschema
import pytest

from tests.clients import environment
from tests.process.harness import null_server, server

MODEL = "SmolLM2-135M-Instruct"
SCRIPT = Path(environment.__file__).with_name("anthropic_messages.py")
CLIENT_S = 300.0
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}


@pytest.mark.timeout(1000)  # the first run makes the environment of the clients
def test_anthropics_client(clients: Path) -> None:
    """Whole and streamed answers, counts, a begun answer, tools and their results, its classes of errors, streams left alone."""
    with server("--kv-memory", "512MiB") as running, null_server("--mode", "disagg") as calling:
        command = [str(clients), str(SCRIPT), running.url, MODEL, calling.url, "null"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=CLIENT_S, check=False)
        assert result.returncode == 0, result.stderr[-4000:]
        running.wait_until_empty(1.0)
        calling.wait_until_empty(1.0)
    got = json.loads(result.stdout)

    talk = got["talk"]
    assert "Paris" in talk["whole"]
    assert talk["final"] == "".join(talk["pieces"]) == talk["whole"]
    assert len(talk["pieces"]) > 3
    assert talk["stop_reasons"][0] == talk["stop_reasons"][1]
    whole, streamed = talk["usage"]
    assert whole["input_tokens"] + whole["cache_read_input_tokens"] == talk["counted"]
    assert streamed["input_tokens"] + streamed["cache_read_input_tokens"] == talk["counted"]
    assert streamed["cache_read_input_tokens"] > 0
    assert whole["output_tokens"] == streamed["output_tokens"]
    assert talk["begun"].startswith(" France")
    assert talk["stopped"] == {"stop_reason": "stop_sequence", "stop_sequence": "Paris"}
    assert talk["request_id"]

    assert got["refusals"]["BadRequestError"][:2] == ["BadRequestError", "invalid_request_error"]
    assert got["refusals"]["BadRequestError"][2].startswith("temperature: ")
    assert got["refusals"]["NotFoundError"][:2] == ["NotFoundError", "not_found_error"]

    call = got["call"]
    for value in call["inputs"]:
        jsonschema.validate(value, SCHEMA)
    assert call["names"] == ["get_weather"] * 2
    assert call["stop_reasons"] == ["tool_use", "tool_use", "max_tokens"]
    assert call["num_deltas"] > 3
    assert call["usage"]["input_tokens"] + call["usage"]["cache_read_input_tokens"] == call["counted"]

    cut, *others = got["left"]
    assert len(set(others)) == 1
    assert others[0].startswith(cut)
    assert len(cut) < len(others[0])
