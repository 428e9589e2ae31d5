"""Messages: what crosses between parent and worker survives it."""

from __future__ import annotations

from typing import get_args

import pytest

from disagg import messages as m
from disagg.kv import KVLayout
from disagg.request import SamplingParams

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, block_size=4, head_dim=8, dtype="uint8", model="x")
PARAMS = SamplingParams(max_tokens=3, logit_bias={5: -1.5}, stop_token_ids=(1, 2), seed=2**63 - 1)
OUTPUT = m.TokenOutput(7, 65, "stop", m.TokenLogprobs(-0.5, [(65, -0.5), (66, -1.0)]))
SAMPLES: list[m.Message] = [
    m.Connect("decode-0", 2, LAYOUT, 9, b"address", 0),
    m.Disconnect("decode-0", 2),
    m.Reserve(1, [1, 2, 3], 2, PARAMS, 2.5),
    m.Prefill(1, [1, 2, 3], 3, PARAMS, m.Target("decode-0", 1, [4, 5], 1)),
    m.Prefill(1, [1], 1, PARAMS, None),
    m.Commit(1, 65),
    m.Abort(1),
    m.Verify(1),
    m.Shutdown(),
    m.Loading(0.5, "weights"),
    m.StartFailed("no"),
    m.Prefilled(7, OUTPUT, 16, [m.TokenLogprobs(-1.0, [])], 0.1, 0.2),
    m.Pushed(7, 100, 0.5, None),
    m.Pushed(7, 100, 0.5, None, [2**64 - 1, 0]),
    m.Commit(1, 65, [2**64 - 1, 0]),
    m.Rejected(7, "kv_corrupted", "block 3"),
    m.Tokens([OUTPUT, m.TokenOutput(8, 66)]),
    m.Quiesced(7),
]


@pytest.mark.parametrize("message", SAMPLES, ids=lambda s: type(s).__name__)
def test_a_message_survives_the_wire(message: m.Message) -> None:
    """decode(encode(m)) == m for every kind of message."""
    assert m.decode(m.encode(message)) == message


def test_every_kind_has_its_own_tag() -> None:
    """The decoder knows each struct by name; none shadows another."""
    names = [kind.__name__ for kind in get_args(m.Message)]
    assert len(names) == len(set(names)) == len(get_args(m.ToWorker)) + len(get_args(m.ToParent))
