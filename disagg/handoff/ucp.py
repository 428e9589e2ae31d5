"""One UCX worker: its options, and tagged messages between its memory and a peer's.

ucxx makes the context, the worker and the endpoints. The messages themselves go through UCX's C interface (the stable ABI of
libucp.so.0), because ucxx can only cancel every receive of a worker at once, and keeps to itself how long a message was: whoever
gives back a reservation has to cancel its own receives and nobody else's.

One thread makes all calls. Those of the C interface are short and keep the GIL; ``progress``, which does the work, releases it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg.errors import HandoffError, StartupError

_IN_PROGRESS = 1  # ucs_status_t; 0 is success, errors are negative
_EXACT = 2**64 - 1  # tag mask: every bit has to match
_NO_IMMEDIATE_COMPLETION = 1 << 16  # UCP_OP_ATTR_FLAG_NO_IMM_CMPL: a request comes back even if all is done already


Memory = NDArray[np.uint8]  # contiguous


class _Received(ctypes.Structure):
    """ucp_tag_recv_info_t."""

    _fields_ = [("sender_tag", ctypes.c_uint64), ("nbytes", ctypes.c_size_t)]


class Ucp:
    """A context with one worker and, as ``address``, what a peer's worker needs to ``connect`` to it.

    ``options`` are UCX's, without ``UCX_``. Nothing else configures it: the variables that UCX would read from the environment
    are taken out of this process's. Raises StartupError without ucxx, or if UCX refuses the options.
    """

    def __init__(self, options: dict[str, str]) -> None:
        self._lib = _import_ucxx()
        try:
            context = self._lib.UCXContext(options, (self._lib.Feature.TAG, self._lib.Feature.WAKEUP))
            self._worker = self._lib.UCXWorker(context)
            self._worker.init_blocking_progress_mode()
        except (self._lib.UCXError, RuntimeError, ValueError) as error:
            asked = ", ".join(f"{name} {options[name]!r}" for name in ("TLS", "NET_DEVICES") if name in options)
            raise StartupError(f"UCX cannot start with {asked}: {error}") from error
        self.address = bytes(self._worker.address)
        self._handle = self._worker.handle
        self._c = _c_interface()
        self._plain = (ctypes.c_uint64 * 32)(_NO_IMMEDIATE_COMPLETION)  # ucp_request_param_t: one flag, no field is set
        self._received = _Received()

    def fileno(self) -> int:
        """Readable when there is something to progress, if ``arm`` has said yes since the last progress."""
        return int(self._worker.epoll_file_descriptor)

    def arm(self) -> bool:
        """False: something has happened already, progress again instead of waiting."""
        return bool(self._worker.arm())

    def progress(self) -> None:
        """Do what can be done without waiting."""
        self._worker.progress()

    def connect(self, address: bytes) -> Any:
        """An endpoint to the worker at ``address``; if that worker has connected to this one before, the other end of that way.

        It reports a peer that dies. Does not wait for the peer. Raises HandoffError if no transport of ours leads there.
        """
        try:
            peer = self._lib.UCXAddress.create_from_buffer(address)
            return self._worker.create_endpoint_from_worker_address(peer, True)
        except (self._lib.UCXError, RuntimeError) as error:
            raise HandoffError(f"UCX finds no way to the peer: {error}") from error

    def is_alive(self, endpoint: Any) -> bool:
        """False once the way has broken, or the peer has gone."""
        return bool(endpoint.alive)

    def disconnect(self, endpoint: Any) -> None:
        """Close at once, without the peer: what is under way over it, in both directions, has ended when this returns."""
        endpoint.close_blocking()
        self._worker.progress()  # it is here that the requests end

    def send(self, endpoint: Any, memory: Memory, tag: int) -> int:
        """Begin to send all of ``memory``, which must not change before it ``is_sent``; the request. Raises HandoffError."""
        return self._request(self._c.ucp_tag_send_nbx(endpoint.handle, memory.ctypes.data, memory.nbytes, tag, self._plain))

    def receive(self, memory: Memory, tag: int) -> int:
        """Wait for the message with exactly this tag, as long as ``memory`` or shorter; the request. Raises HandoffError."""
        return self._request(self._c.ucp_tag_recv_nbx(self._handle, memory.ctypes.data, memory.nbytes, tag, _EXACT, self._plain))

    def cancel(self, request: int) -> None:
        """End a receive that no message has matched yet. One that is being written goes on."""
        self._c.ucp_request_cancel(self._handle, request)

    def is_sent(self, request: int) -> bool:
        """False while it is under way. Once the answer is True, or a HandoffError that says why not, the request is gone."""
        return self._is_over(request, self._c.ucp_request_check_status(request))

    def received(self, request: int) -> int | None:
        """None while it is awaited or under way, then its bytes. Raises HandoffError and ends as ``is_sent`` does."""
        status = self._c.ucp_tag_recv_request_test(request, ctypes.byref(self._received))
        return int(self._received.nbytes) if self._is_over(request, status) else None

    def discard(self, request: int) -> None:
        """Take no interest in how it ended: it has been cancelled, or its endpoint is closed."""
        self._c.ucp_request_free(request)

    def refuse_unexpected(self) -> None:
        """Answer what no receive matches: its sender is told that it has been sent, and not a byte of it is stored."""
        while message := self._c.ucp_tag_probe_nb(self._handle, 0, 0, 1, ctypes.byref(self._received)):
            with contextlib.suppress(HandoffError):  # whose end it is anyway
                self.discard(self._request(self._c.ucp_tag_msg_recv_nbx(self._handle, None, 0, message, self._plain)))

    def close(self) -> None:
        """All endpoints have been disconnected. Nothing is read or written by UCX afterwards."""
        self.progress()
        self.refuse_unexpected()
        del self._worker

    def _request(self, pointer: int) -> int:
        if (status := ctypes.c_int64(pointer).value) < 0 and status > -128:
            raise HandoffError(f"UCX refused a message: {self._text(status)}")
        return pointer

    def _is_over(self, request: int, status: int) -> bool:
        if status == _IN_PROGRESS:
            return False
        self._c.ucp_request_free(request)
        if status < 0:
            raise HandoffError(self._text(status))
        return True

    def _text(self, status: int) -> str:
        text: bytes = self._c.ucs_status_string(status)
        return text.decode()


def _import_ucxx() -> Any:
    """ucxx's bindings. The import itself sets variables (a rendezvous threshold for one) that would change what UCX does."""
    _clean_environment()
    try:
        from ucxx._lib import libucxx
    except ImportError as error:
        raise StartupError(f"UCX is not installed ({error}): pip install 'disagg[ucx]'") from error
    _clean_environment()
    return libucxx


def _clean_environment() -> None:
    for name in [name for name in os.environ if name.startswith("UCX_")]:
        del os.environ[name]


def _c_interface() -> ctypes.PyDLL:
    library = ctypes.PyDLL("libucp.so.0")  # the copy that ucxx has loaded
    pointer, size, tag = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
    for name, result, arguments in (
        ("ucp_tag_send_nbx", ctypes.c_uint64, (pointer, pointer, size, tag, pointer)),
        ("ucp_tag_recv_nbx", ctypes.c_uint64, (pointer, pointer, size, tag, tag, pointer)),
        ("ucp_tag_probe_nb", pointer, (pointer, tag, tag, ctypes.c_int, pointer)),
        ("ucp_tag_msg_recv_nbx", ctypes.c_uint64, (pointer, pointer, size, pointer, pointer)),
        ("ucp_tag_recv_request_test", ctypes.c_int8, (pointer, pointer)),
        ("ucp_request_check_status", ctypes.c_int8, (pointer,)),
        ("ucp_request_cancel", None, (pointer, pointer)),
        ("ucp_request_free", None, (pointer,)),
        ("ucs_status_string", ctypes.c_char_p, (ctypes.c_int8,)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
