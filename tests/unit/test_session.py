"""disagg.session: only who knows the secret is heard, and only what it said, in the order in which it said it."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg import session
from disagg.errors import ConfigError, LinkError
from disagg.session import MAX_HANDSHAKE, Beat, Bye, Challenge, Data, LinkMessage, Proof, Session, Side, read_token

SECRET = b"a secret of sixteen bytes"


class End:
    """A session whose bytes for the peer are kept until somebody passes them on."""

    def __init__(self, side: Side, secret: bytes = SECRET) -> None:
        self.outgoing = bytearray()
        self.session = Session(side, secret, self.outgoing.extend)

    def take(self) -> bytes:
        data = bytes(self.outgoing)
        self.outgoing.clear()
        return data

    def receive(self, data: bytes) -> list[LinkMessage]:
        return list(self.session.feed(data))


def meet(head: End, node: End) -> None:
    for _ in range(2):  # the challenges, then the proofs
        to_node, to_head = head.take(), node.take()
        assert node.receive(to_node) == head.receive(to_head) == []


def pair() -> tuple[End, End]:
    head, node = End(Side.HEAD), End(Side.NODE)
    meet(head, node)
    assert head.session.is_proven
    assert node.session.is_proven
    return head, node


def packed(message: Any) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(payload)) + payload


# ------------------------------------------------------------------------------------------------ handshake


def test_both_sides_prove_the_secret_and_then_talk() -> None:
    """Two messages each way, then anything that a link carries, however the bytes are cut."""
    head, node = pair()
    said = [Data("decode-0", 3, b"\0" * 1000, "prefill-0"), Beat(), Bye("that is all")]
    for message in said:
        node.session.send(message)
    data = node.take()
    heard = [message for index in range(len(data)) for message in head.receive(data[index : index + 1])]
    assert heard == said


@pytest.mark.parametrize("side", Side)
def test_a_wrong_secret_is_noticed_by_both_sides(side: Side) -> None:
    """Each can tell by itself, and that trying again is of no use; nobody has said anything by then."""
    one, other = End(side, b"another secret, as long"), End(side.other)
    challenges = one.take(), other.take()
    assert one.receive(challenges[1]) == other.receive(challenges[0]) == []
    for end, proof in ((other, one.take()), (one, other.take())):
        with pytest.raises(LinkError, match="another token") as caught:
            end.receive(proof)
        assert caught.value.is_final
        assert not end.session.is_proven


def test_a_proof_of_another_handshake_proves_nothing() -> None:
    """Who has listened to a node joining cannot join in its place: every handshake has nonces of its own."""
    head, node = End(Side.HEAD), End(Side.NODE)
    node.receive(head.take())
    recorded = node.take()
    another = End(Side.HEAD)
    with pytest.raises(LinkError, match="another token"):
        another.receive(recorded)


def test_a_proof_sent_back_proves_nothing() -> None:
    """A stranger that repeats whatever the head says is refused: a proof holds for one side only."""
    head = End(Side.HEAD)
    head.receive(head.take())  # its own challenge
    with pytest.raises(LinkError, match="another token"):
        head.receive(head.take())


def test_another_version_is_named_before_any_proof_is_given() -> None:
    """Both numbers are in the error, and the side that noticed has not answered the challenge."""
    head = End(Side.HEAD)
    head.take()
    with pytest.raises(LinkError, match=f"version {session.VERSION + 1} of the link, this side {session.VERSION}") as caught:
        head.receive(packed(Challenge(session.VERSION + 1, b"n" * 32)))
    assert caught.value.is_final
    assert head.take() == b""


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "that is no message of this link"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "is TLS on at one side only"),
        (struct.pack("<I", MAX_HANDSHAKE + 1), f"a frame of {MAX_HANDSHAKE + 1} bytes"),
        (struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1", "no message of the handshake"),
        (packed(Bye("an unproven farewell")), "no message of the handshake"),
        (packed(Challenge(session.VERSION, b"short")), "a nonce of 5 bytes"),
        (packed(Proof(b"x" * 32)), "Proof came out of turn"),
        (packed(Challenge(session.VERSION, b"n" * 32)) * 2, "Challenge came out of turn"),
    ],
)
def test_nothing_but_the_handshake_is_read_from_a_stranger(data: bytes, reason: str) -> None:
    """Garbage, other protocols, other messages and too many bytes end the session, with the reason."""
    head = End(Side.HEAD)
    with pytest.raises(LinkError, match=reason):
        head.receive(data)
    assert not head.session.is_proven


@given(st.binary(max_size=200))
def test_garbage_raises_link_errors_only(garbage: bytes) -> None:
    """Whatever a stranger or a broken peer sends, nothing else than LinkError comes of it, and no message."""
    stranger, (head, _) = End(Side.HEAD), pair()
    for end in (stranger, head):
        try:
            heard = end.receive(garbage)
        except LinkError:
            heard = []
        assert heard == []


# ------------------------------------------------------------------------------------------------ what is said afterwards


@pytest.mark.parametrize("place", [0, 4, 20, -1])
def test_a_changed_byte_closes_the_link(place: int) -> None:
    """Of the length, the message or its MAC: nothing that was changed on the way is ever heard."""
    head, node = pair()
    node.session.send(Data("decode-0", 1, b"tokens" * 100))
    data = bytearray(node.take())
    data[place] ^= 1
    data += bytes(1)  # so that a longer length finds its bytes
    with pytest.raises(LinkError, match="somebody on the way"):
        head.receive(bytes(data))


@pytest.mark.parametrize("order", [(0, 0), (1, 0), (1,)], ids=["repeated", "swapped", "left out"])
def test_frames_are_heard_once_and_in_order(order: tuple[int, ...]) -> None:
    """A frame that is repeated, overtaken or missing closes the link, although every byte of it is genuine."""
    head, node = pair()
    frames = []
    for reason in ("first", "second"):
        node.session.send(Bye(reason))
        frames.append(node.take())
    with pytest.raises(LinkError, match="is not what the other side sent next"):
        head.receive(b"".join(frames[index] for index in order))


def test_what_one_side_said_cannot_be_told_to_it() -> None:
    """Each direction has a key of its own."""
    head, _ = pair()
    head.session.send(Beat())
    with pytest.raises(LinkError, match="is not what the other side sent next"):
        head.receive(head.take())


# ------------------------------------------------------------------------------------------------ the token file


def test_a_token_file_is_read_without_its_line_end(tmp_path: Path) -> None:
    """The secret is what an editor or ``openssl rand -hex`` wrote, less the white space around it."""
    path = tmp_path / "token"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o600)
    assert read_token(str(path)) == b"0123456789abcdef"


def test_a_token_that_others_can_guess_or_read_is_refused(tmp_path: Path) -> None:
    """No file, too short a secret, or one that every user of the host can read: the error says what to do."""
    path = tmp_path / "token"
    for text, mode, reason in (("short\n", 0o600, "at least 16 are needed"), ("0123456789abcdef", 0o644, "chmod o=")):
        path.write_text(text)
        os.chmod(path, mode)
        with pytest.raises(ConfigError, match=reason):
            read_token(str(path))
    for name in ("", str(tmp_path / "none"), str(tmp_path)):
        with pytest.raises(ConfigError, match=r"cluster\.token_file"):
            read_token(name)
