"""Streams of tokens become text as early as it is certain, and never otherwise."""

import functools
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from disagg.model import ModelFiles
from disagg.text.detokenizer import Detokenizer
from disagg.text.tokenizer import Tokenizer, load_tokenizer

PIECES = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁▁", "wor", "ld", "é", "中", "▁<", "<0x", "0A>"]


@functools.cache
def byte_level() -> Tokenizer:
    return load_tokenizer(ModelFiles(kind="null", path=Path(), name="null"))


@functools.cache
def sentencepiece() -> Tokenizer:
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(PIECES)}, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>"])
    return Tokenizer(backend)


def ids_of(*pieces: str) -> list[int]:
    return [PIECES.index(piece) for piece in pieces]


IDS = st.lists(st.integers(0, 270) | st.sampled_from(list("é中👍🏽".encode())), max_size=30)


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@given(ids=IDS, skip=st.booleans())
def test_a_stream_is_the_whole_text(make, ids, skip):
    """Pushed and flushed text together are the text of all ids, broken and unknown ones included."""
    stream = Detokenizer(make(), skip_special=skip)
    assert "".join(map(stream.push, ids)) + stream.flush() == make().decode(ids, skip_special=skip)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_valid_text_never_shows_a_replacement(text):
    """After each byte of valid UTF-8 exactly the complete characters have been emitted."""
    stream, emitted = Detokenizer(byte_level()), ""
    for end, byte in enumerate(text.encode(), start=1):
        emitted += stream.push(byte)
        assert emitted == text.encode()[:end].decode("utf-8", "ignore")
    assert stream.flush() == ""


@given(st.lists(st.integers(0, 255), max_size=12))
@example([0xED, 0xA0])
def test_text_is_emitted_exactly_when_no_next_byte_can_change_it(data):
    """What was emitted is what every continuation agrees on: nothing is retracted, nothing certain waits.

    But for two bytes that begin a surrogate, which no continuation saves: CPython's decoder keeps them until the next.
    """
    stream = Detokenizer(byte_level())
    emitted = "".join(map(stream.push, data))
    tails = [b"", b"A", *(bytes([first]) + b"\x80" * more for first in (0x80, 0x90, 0xA0) for more in range(3))]
    continuations = [(bytes(data) + tail).decode("utf-8", "replace") for tail in tails]
    assert all(text.startswith(emitted) for text in continuations)
    rest = [text[len(emitted) :] for text in continuations]
    is_half_surrogate = data[-2:-1] == [0xED] and data[-1] in range(0xA0, 0xC0)
    assert is_half_surrogate or any(tail[:1] != rest[0][:1] for tail in rest)


def test_a_broken_byte_is_replaced_at_once_and_a_cut_one_waits():
    """0xFF can begin nothing; 0xE4 0xBD may still become a character, and is one U+FFFD if the stream ends there."""
    stream = Detokenizer(byte_level())
    assert [stream.push(byte) for byte in b"\xffa\xe4\xbd"] == ["\ufffd", "a", "", ""]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_special_tokens_show_only_when_asked():
    """Control tokens are skipped by default, also inside a character, and shown by their names otherwise."""
    end = byte_level().eos_token_ids[0]
    ids = [0xC3, end, 0xA9]
    assert byte_level().decode(ids) == "é"
    assert byte_level().decode(ids, skip_special=False) == "\ufffd<|im_end|>\ufffd"


def test_the_first_space_goes_only_at_the_start_of_a_text():
    """A SentencePiece text loses one leading space; a text that continues another keeps it; later spaces all stay."""
    hello = ids_of("▁Hello", "▁", "wor", "ld")
    assert sentencepiece().decode(hello) == "Hello world"
    assert sentencepiece().decode(ids_of("▁▁", "▁Hello")) == "  Hello"
    assert sentencepiece().decode([PIECES.index("<unk>"), *hello]) == "Hello world"
    stream = Detokenizer(sentencepiece(), continues=True)
    assert "".join(map(stream.push, hello)) == " Hello world"


def test_byte_tokens_make_characters_and_text_like_them_does_not():
    """<0xE4><0xB8><0xAD> is 中; the letters "<0x" and "0A>" are letters."""
    assert sentencepiece().decode(ids_of("<0xE4>", "<0xB8>", "<0xAD>")) == "中"
    assert sentencepiece().decode(ids_of("<0x", "0A>")) == "<0x0A>"
