"""Files with secrets, and the API keys in them."""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Any

import pytest

from disagg import credentials
from disagg.credentials import ApiKeys, read_private
from disagg.errors import ConfigError

ALICE, BOB = "alice-0123456789abcdef", "bob-fedcba9876543210"


def key_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_secret_that_everybody_can_read_is_none(tmp_path: Path) -> None:
    """Refused with the command that repairs it; a group may read it; what is missing says why."""
    assert read_private(str(key_file(tmp_path, "x", 0o640)), "a.setting") == b"x"
    with pytest.raises(ConfigError, match=r"a\.setting: every user of this host can read .*: chmod o= "):
        read_private(str(key_file(tmp_path, "x", 0o644)), "a.setting")
    with pytest.raises(ConfigError, match=r"a\.setting: cannot read .*: No such file"):
        read_private(str(tmp_path / "missing"), "a.setting")


def test_keys_have_names_and_only_the_names_are_kept(tmp_path: Path) -> None:
    """name:key or a bare key, which is called after its line; comments are skipped; no key is anywhere in the object."""
    keys = ApiKeys(str(key_file(tmp_path, f"# clients\n\n alice : {ALICE}\n{BOB}\n")), {})
    assert keys
    assert [keys.name_of(key) for key in (ALICE, BOB, ALICE[:-1], "", "é", "\udcff")] == [
        "alice",
        "key-4",
        None,
        None,
        None,
        None,
    ]
    assert repr(keys) == "ApiKeys(alice, key-4)"
    assert not any(secret in repr(vars(keys)) for secret in (ALICE, BOB))


def test_a_key_can_be_changed_without_a_gap(tmp_path: Path) -> None:
    """Two keys of one name are both let in, and ``load`` takes what the file says now."""
    path = key_file(tmp_path, f"alice:{ALICE}\nalice:{BOB}")
    keys = ApiKeys(str(path), {})
    assert [keys.name_of(ALICE), keys.name_of(BOB)] == ["alice", "alice"]
    path.write_text(f"alice:{BOB}")
    keys.load()
    assert [keys.name_of(ALICE), keys.name_of(BOB)] == [None, "alice"]
    path.write_text("")
    with pytest.raises(ConfigError, match="has no key in it"):
        keys.load()
    assert keys.name_of(BOB) == "alice", "a file without keys must not open the server"


def test_every_key_is_compared_whichever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that an answer takes tells nothing: all digests are compared, by ``hmac.compare_digest``."""
    keys = ApiKeys(str(key_file(tmp_path, f"{ALICE}\n{BOB}")), {})
    compared: list[Any] = []

    def compare(known: bytes, given: bytes) -> bool:
        compared.append((known, given))
        return hmac.compare_digest(known, given)

    monkeypatch.setattr(credentials, "hmac", type("Hmac", (), {"compare_digest": staticmethod(compare)}))
    for key in (ALICE, BOB, "nobody's"):
        compared.clear()
        keys.name_of(key)
        assert len(compared) == 2
        assert all(len(known) == len(given) == 32 for known, given in compared)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("short", "at least 16 characters"),
        ("a name:0123456789abcdef", "a name is made of"),
        (":0123456789abcdef", "a name is made of"),
        ("x:0123456789 abcdef", "printable ASCII"),
        ("x:0123456789abcdéf", "printable ASCII"),
        ("x:0123456789:abcdef", "printable ASCII"),
        (f"second:{ALICE}", "twice"),
    ],
)
def test_a_line_that_is_no_key_is_named_and_not_shown(tmp_path: Path, line: str, problem: str) -> None:
    """The number of the line is enough; what stands there may be a key all the same."""
    with pytest.raises(ConfigError) as caught:
        ApiKeys(str(key_file(tmp_path, f"{ALICE}\n{line}")), {})
    assert "line 2" in str(caught.value)
    assert problem in str(caught.value)
    assert line.rpartition(":")[2] not in str(caught.value).replace("at least 16", "")


def test_the_service_managers_credential_takes_the_place_of_a_file(tmp_path: Path) -> None:
    """$CREDENTIALS_DIRECTORY/api-keys; there may be none in it, or no such credential, and then none are asked for."""
    assert not ApiKeys("", {})
    assert not ApiKeys("", {"CREDENTIALS_DIRECTORY": str(tmp_path)})
    key_file(tmp_path, "# none yet").rename(tmp_path / "api-keys")
    assert not ApiKeys("", {"CREDENTIALS_DIRECTORY": str(tmp_path)})
    key_file(tmp_path, ALICE).rename(tmp_path / "api-keys")
    assert ApiKeys("", {"CREDENTIALS_DIRECTORY": str(tmp_path)}).name_of(ALICE) == "key-1"
    with pytest.raises(ConfigError, match="has no key in it"):
        ApiKeys(str(key_file(tmp_path, "# none yet")), {})
    with pytest.raises(ConfigError, match="cannot read"):
        ApiKeys("", {"CREDENTIALS_DIRECTORY": str(tmp_path / "api-keys")})  # what is there and cannot be read is not "none"
