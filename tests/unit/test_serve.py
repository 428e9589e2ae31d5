"""What the composition root refuses before it starts anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from disagg.launcher import ProcessLauncher
from disagg.serve import Server
from disagg.settings import load_config


def built(**server: Any) -> Server:
    """On the null engine; nothing is started."""
    settings = {"model.path": "null", "kv.memory": "4MiB", **{f"server.{name}": value for name, value in server.items()}}
    return Server(load_config(None, {}, settings)[0], ProcessLauncher())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_on_loopback_no_key_is_needed(host: str) -> None:
    """Whoever can connect is on this host."""
    assert built(host=host).config.server.host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "box.example", "::ffff:192.0.2.1"])
def test_off_loopback_there_are_keys_or_it_is_meant(host: str, tmp_path: Path) -> None:
    """Refused with what to do; let through with keys, or with --insecure."""
    with pytest.raises(ConfigError, match="--api-key-file"):
        built(host=host)
    keys = tmp_path / "keys"
    keys.write_text("me:0123456789abcdef")
    keys.chmod(0o600)
    assert built(host=host, api_key_file=str(keys)).keys
    assert not built(host=host, insecure=True).keys


def test_a_certificate_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    """Missing, no certificate, a key that everybody can read, a key without a certificate: each says which file."""
    pem = tmp_path / "cert.pem"
    with pytest.raises(ConfigError, match=r"server\.tls_cert: cannot read"):
        built(tls_cert=str(pem))
    pem.write_text("no certificate")
    pem.chmod(0o600)
    with pytest.raises(ConfigError, match=r"server\.tls_cert: cannot use"):
        built(tls_cert=str(pem))
    pem.chmod(0o644)
    with pytest.raises(ConfigError, match=r"server\.tls_key: every user of this host can read"):
        built(tls_cert=str(pem), tls_key=str(pem))
    with pytest.raises(ConfigError, match=r"server\.tls_key: there is no"):
        built(tls_key=str(pem))
