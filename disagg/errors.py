"""The errors that cross a layer, each saying whose fault it is.

Foreign exceptions are translated where they enter (``raise … from``). ``assert`` is for our own bugs only: everything
that input, a peer process or the operating system can cause has a name here.
"""

from __future__ import annotations


class DisaggError(Exception):
    """Root of every error this package raises on purpose."""


class ConfigError(DisaggError):
    """The operator's settings cannot be used. The message names the setting and what to do."""


class UnsupportedModelError(ConfigError):
    """The model's files are readable but describe something this version cannot run."""


class StartupError(DisaggError):
    """The host cannot give what the configuration asks for (memory, port, file descriptors, a worker that will not start)."""


class InvalidRequestError(DisaggError):
    """The client's request is wrong (HTTP 4xx).

    ``param`` is the offending field, ``code`` a short machine-readable reason (OpenAI's where one exists), ``status`` the
    HTTP status.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class OverloadedError(DisaggError):
    """The queue is full (HTTP 429). ``retry_after_s`` estimates when it is worth coming back."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(DisaggError):
    """Nobody can serve now: draining, starting, or no healthy workers (HTTP 503)."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestFailedError(DisaggError):
    """An admitted request could not be finished (HTTP 500, or an error event once streaming has begun).

    ``reason`` is one of the typed reasons in ``disagg.request.FailReason``.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class GrammarError(DisaggError):
    """A grammar cannot be compiled, or has become too complex to follow. The message says why."""


class ProtocolError(DisaggError):
    """A peer process sent something that is not in ``disagg.messages``."""


class LinkError(DisaggError):
    """The link to another node could not be made, or has ended. ``is_final``: trying again would end the same way."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


class HandoffError(DisaggError):
    """KV bytes could not be moved: layouts differ, the peer is unknown or gone, the copy failed."""


class OutOfBlocksError(DisaggError):
    """The KV pool has fewer free and evictable blocks than asked for."""


class IllegalTransitionError(DisaggError):
    """A state table was asked for a move it does not have. Always our bug; nothing was changed."""
