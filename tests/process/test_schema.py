"""The description of the surface against a real server, by a client that knows nothing but that description."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.process.harness import null_server

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,negative_data_rejection,unsupported_method,allow_header_conformance"
)
LIMIT_S = 170.0


@pytest.mark.timeout(1000)  # the first run makes the environment of the clients
def test_the_server_is_as_it_is_described(clients: Path, tmp_path: Path) -> None:
    """schemathesis, with one seed: no 5xx; statuses, content types and bodies as promised; what the schema forbids is refused."""
    with null_server("--max-model-len", "512") as running:  # answers whose length is left open end soon
        result = subprocess.run(
            [
                *(str(clients.with_name("schemathesis")), "run", running.url + "/openapi.json", "--checks", CHECKS),
                *("--phases", "coverage,fuzzing", "--max-examples", "20", "--seed", "1", "--no-shrink", "--continue-on-failure"),
                *("--request-timeout", "30", "--warnings", "off", "--no-color"),
            ],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            cwd=tmp_path,
        )
        assert result.returncode == 0, result.stdout[-8000:]
        passed = re.search(r"(\d+) generated, (\d+) passed", result.stdout)
        assert passed is not None, result.stdout
        assert passed[1] == passed[2]
        assert int(passed[1]) > 500
        running.wait_until_empty(1.0)
