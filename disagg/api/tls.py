"""The certificate that the HTTP listener shows. Read again when told to; open connections keep what they began with."""

from __future__ import annotations

import ssl

from disagg.credentials import load_certificate
from disagg.errors import ConfigError


class Certificate:
    """``context`` stays the same object for the listener's life; ``load`` changes what its next handshakes show."""

    def __init__(self, cert: str, key: str) -> None:
        """PEM files; an empty ``key`` means that it is in the same file. Raises ConfigError."""
        self._cert, self._key = cert, key
        self.context = self._read(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))
        self.context.set_alpn_protocols(["http/1.1"])

    def load(self) -> None:
        """Take what the files say now. Raises ConfigError, and goes on with what it had."""
        self._read(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))  # half of a new pair must not get into the one in use
        self._read(self.context)

    def _read(self, context: ssl.SSLContext) -> ssl.SSLContext:
        load_certificate(context, self._cert, self._key, "server")
        return context


def certificate(cert: str, key: str) -> Certificate | None:
    """None without ``cert``: plain HTTP. Raises ConfigError."""
    if key and not cert:
        raise ConfigError("server.tls_key: there is no server.tls_cert to go with it")
    return Certificate(cert, key) if cert else None
