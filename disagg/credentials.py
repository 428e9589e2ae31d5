"""Secrets in files: read whole, refused where any user of the host can read them, and never shown.

API keys stand one on a line, bare or as ``name:key``; empty lines and what begins with ``#`` are skipped. Only their SHA-256 is
kept. The name is what logs and metrics say; two keys may share one, so that a key can be changed without a gap.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import ssl
import stat
from collections.abc import Mapping

from disagg.errors import ConfigError

MIN_KEY = 16
"""Characters. Whoever can reach the port can try keys as fast as it answers."""

_CREDENTIAL = "api-keys"
_KEY = re.compile(r"[!-9;-~]+")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")


def read_private(path: str, setting: str) -> bytes:
    """The content of the file that ``setting`` names. Raises ConfigError when it, or anybody else, cannot or can read it."""
    try:
        with open(path, "rb") as file:
            mode, content = os.fstat(file.fileno()).st_mode, file.read()
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}") from error
    if mode & stat.S_IROTH:
        raise ConfigError(f"{setting}: every user of this host can read {path}: chmod o= {path}")
    return content


def load_certificate(context: ssl.SSLContext, cert: str, key: str, section: str) -> None:
    """Have ``context`` show what the PEM files ``section``.tls_cert and .tls_key hold. An empty ``key``: both are in ``cert``.

    Raises ConfigError for files that cannot be used, and for a key that any user of the host can read.
    """
    read_private(key or cert, f"{section}.tls_key" if key else f"{section}.tls_cert")
    try:
        context.load_cert_chain(cert, key or None, password="")  # an encrypted key is refused, not asked about
    except OSError as error:
        raise ConfigError(f"{section}.tls_cert: cannot use {cert} with the key in {key or cert}: {error}") from error


class ApiKeys:
    """The keys in one file, or in the service manager's credential ``api-keys``; without either, none, and nobody is asked.

    False when there are none.
    """

    def __init__(self, path: str, environ: Mapping[str, str]) -> None:
        """Reads them. Raises ConfigError for a file that cannot be used, and for one that was named and has no key in it."""
        folder = environ.get("CREDENTIALS_DIRECTORY", "")
        self._is_named = bool(path)
        self._path = path or (os.path.join(folder, _CREDENTIAL) if folder else "")
        self._names: dict[bytes, str] = {}
        self.load()

    def __bool__(self) -> bool:
        return bool(self._names)

    def __repr__(self) -> str:
        return f"ApiKeys({', '.join(self._names.values())})"

    @property
    def is_file(self) -> bool:
        """Whether there is something that ``load`` can find changed."""
        return bool(self._path)

    def load(self) -> None:
        """Take what the file says now. Raises ConfigError, and keeps the keys it had."""
        if not self._path or (not self._is_named and _is_missing(self._path)):
            return
        names = _parse(read_private(self._path, "server.api_key_file"), self._path)
        if not names and (self._is_named or self._names):
            raise ConfigError(f"server.api_key_file: {self._path} has no key in it")
        self._names = names

    def name_of(self, key: str) -> str | None:
        """Whose key it is; None = nobody's. Takes as long for any key: all are compared, by their digests."""
        digest = _digest(key)
        found = None
        for known, name in self._names.items():
            if hmac.compare_digest(known, digest):
                found = name
        return found


def _is_missing(path: str) -> bool:
    """What is there and cannot be looked at is not missing: a server that was to have keys must not open without them."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _parse(content: bytes, path: str) -> dict[bytes, str]:
    """Digest → name. An error names the line, never what stands there."""
    names: dict[bytes, str] = {}
    for number, raw in enumerate(content.decode("utf-8", "surrogateescape").splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        name, separator, key = line.partition(":")
        if not separator:
            name, key = f"key-{number}", line
        name, key = name.strip(), key.strip()
        problem = ""
        if not _NAME.fullmatch(name):
            problem = "a name is made of letters, digits and . _ @ -"
        elif len(key) < MIN_KEY:
            problem = f"a key has at least {MIN_KEY} characters: openssl rand -hex 32"
        elif not _KEY.fullmatch(key):
            problem = "a key is made of printable ASCII without spaces and colons"
        elif _digest(key) in names:
            problem = "this key stands there twice"
        if problem:
            raise ConfigError(f"server.api_key_file: {path} line {number}: {problem}")
        names[_digest(key)] = name
    return names


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
