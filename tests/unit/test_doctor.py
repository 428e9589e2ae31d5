"""disagg.doctor: each check tells good from bad, with what to do; the command's exit code says whether one failed."""

from __future__ import annotations

import json
import resource
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from disagg import cli, doctor, speed
from disagg.config import Config, ModelConfig
from disagg.doctor import Check, Verdict
from disagg.errors import HandoffError

PASS, WARN, FAIL = Verdict.PASS, Verdict.WARN, Verdict.FAIL


@pytest.mark.parametrize(
    ("check", "verdict", "words"),
    [
        (lambda: doctor.cpu({"avx2", "avx512f"}), PASS, "AVX2, AVX-512"),
        (lambda: doctor.cpu({"sse2"}), WARN, "no vector instructions"),
        (lambda: doctor.open_files(resource.RLIM_INFINITY), PASS, "unlimited"),
        (lambda: doctor.open_files(1024), WARN, "1024"),
        (lambda: doctor.locked_memory(8 << 20, True), WARN, "8 MiB"),
        (lambda: doctor.locked_memory(8 << 20, False), PASS, "not needed"),
        (lambda: doctor.environment({"UCX_TLS": "tcp", "HOME": "/"}), WARN, "UCX_TLS set, and ignored"),
        (lambda: doctor.environment({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}), WARN, "expandable_segments"),
        (lambda: doctor.environment({"HOME": "/"}), PASS, "nothing"),
        (lambda: doctor.memory_copy(12.0), PASS, "12.0 GB/s"),
        (lambda: doctor.memory_copy(0.3), WARN, "0.3 GB/s"),
        (lambda: doctor.handover(5.0), PASS, "5.0 GB/s"),
        (lambda: doctor.handover(0.2), WARN, "0.2 GB/s"),
        (lambda: doctor.port("a" * 70, 1), FAIL, "no name of a host"),
    ],
)
def test_a_check_tells_good_from_bad(check: Callable[[], Check], verdict: Verdict, words: str) -> None:
    """What is found is in the finding; what is not good says what to do."""
    found = check()
    assert found.verdict is verdict
    assert words in found.finding
    assert bool(found.fix) == (verdict is not PASS)


def test_an_occupied_port_fails_and_a_free_one_passes() -> None:
    """The server would not start, and is told which other port to take."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        assert doctor.port("127.0.0.1", number).verdict is FAIL
        assert "--port" in doctor.port("127.0.0.1", number).fix
    assert doctor.port("127.0.0.1", 0).verdict is PASS


def test_a_name_with_several_addresses_needs_the_port_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the server listens on each: localhost is often 127.0.0.1 and ::1."""
    with socket.create_server(("127.0.0.2", 0)) as taken:
        number = taken.getsockname()[1]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, number)) for host in ("127.0.0.1", "127.0.0.2")]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        assert doctor.port("both", number).verdict is FAIL


def test_a_model_that_is_not_there_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """What raises fails with its own message, and the checks after it are still done."""
    stand_in_for_children(monkeypatch)
    found = {check.name: check for check in doctor.examine(Config(model=ModelConfig(path="/nowhere/model.gguf")))}
    for name in ("model", "chat template", "memory"):
        assert found[name].verdict is FAIL
        assert "/nowhere/model.gguf" in found[name].finding
    assert found["hand-over"].verdict is PASS


def stand_in_for_children(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = b'{"version": "2", "built_for": "cpu", "kernels": "AVX2", "devices": []}'
    monkeypatch.setattr(doctor, "_ask", lambda program, *arguments: torch)
    monkeypatch.setattr(doctor, "copy_rate", lambda: 9.0)
    monkeypatch.setattr(doctor, "handoff_rate", lambda: 9.0)


def test_a_child_that_cannot_answer_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that does not import: its last word is the cause."""
    monkeypatch.setattr(doctor, "_ASK_TORCH", "raise ImportError('libcudart.so.13 is missing')")
    found = doctor._torch()
    assert found.verdict is FAIL
    assert "libcudart.so.13 is missing" in found.finding


def test_the_command_looks_at_this_host(capsys: pytest.CaptureFixture[str]) -> None:
    """The real thing with the null model: every check has an answer, in JSON, and bytes went between two processes."""
    assert cli.main(["doctor", "--model", "null", "--port", "0", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in answer["checks"]}
    assert answer["ok"]
    assert len(checks) == 14
    assert "GB/s" in checks["hand-over"]["finding"]
    assert "torch" in checks["torch"]["finding"]


def test_a_failure_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """And the table says what to do, and counts."""
    stand_in_for_children(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert cli.main(["doctor", "--model", "null", "--port", str(taken.getsockname()[1])]) == 1
    text = capsys.readouterr().out
    assert "fail  port" in text
    assert "→ choose another with --port" in text
    assert "1 fail" in text


def test_bytes_that_arrive_changed_are_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate is worth nothing when the bytes are not the ones that were sent."""
    real = speed._pushed

    def spoil(transport: speed.ShmTransport, blocks: list[int]) -> speed.Completed:
        completed = real(transport, blocks)
        transport._peers["child"].blocks[0, 0] ^= 1
        return completed

    monkeypatch.setattr(speed, "_ROUNDS", 1)
    monkeypatch.setattr(speed, "_pushed", spoil)
    with pytest.raises(HandoffError, match="changed"):
        speed.handoff_rate()
