"""The integrity of the hand-over with real processes and shared memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.process.harness import null_server, server

LIMIT_S = 120.0


def run_verify(*arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "disagg", "verify", "--kv-memory", "64MiB", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return result.returncode, result.stdout, result.stderr


def test_verify_passes_on_the_null_model() -> None:
    """Three servers, one after the other: all answers equal, bytes handed over, nothing corrupted, nothing computed twice."""
    code, out, err = run_verify("--model", "null", "--prompts", "6", "--tokens", "12", "--json")
    assert code == 0, err
    document: dict[str, Any] = json.loads(out)
    assert document["equal"]
    assert len(document["kinds"]) == 6
    assert (document["control"], document["disaggregated"]) == ([], [])
    assert document["handed_over_nbytes"] > 0
    assert (document["corrupted_blocks"], document["recomputed_tokens"]) == (0, 0)


def test_a_server_that_cannot_start_is_exit_code_2() -> None:
    """The child's own reason reaches the terminal."""
    code, out, err = run_verify("--model", "null", "--prompts", "1", "--max-model-len", "100000000")
    assert (code, out) == (2, "")
    assert "100000000" in err


@pytest.mark.slow
def test_a_configuration_for_others_does_not_lock_the_verifier_out(tmp_path: Path) -> None:
    """Keys, certificates and addresses of the file are for the server that others use, not for the private ones compared here."""
    config = tmp_path / "disagg.toml"
    config.write_text("""
[server]
host = "192.0.2.1"
api_key_file = "nothing"
tls_cert = "nothing"
requests_per_minute = 1
[model]
path = "null"
""")
    code, out, err = run_verify("--config", str(config), "--prompts", "2", "--tokens", "3", "--json")
    assert (code, json.loads(out)["equal"]) == (0, True), err


@pytest.mark.slow
def test_a_server_that_verifies_gives_the_same_text_and_counts_no_corruption() -> None:
    """--verify-kv over shared memory, with the copying on its own thread: every block that arrives is the one that was sent."""
    prompt = "verified " * 200
    with null_server("--mode", "colocated") as plain:
        expected = plain.complete(prompt, 20)
    with server("--model", "null", "--kv-memory", "64MiB", "--mode", "disagg", "--verify-kv", "--chunk-tokens", "64") as verified:
        assert verified.complete(prompt, 20) == expected
        metrics = verified.request("GET", "/metrics")[1].splitlines()
        assert "disagg_corrupted_blocks_total 0.0" in metrics
        assert not any(line == 'disagg_transfer_bytes_total{transport="shm"} 0.0' for line in metrics)
        assert any(line.startswith('disagg_transfer_bytes_total{transport="shm"}') for line in metrics)
        verified.wait_until_empty(2.0)
