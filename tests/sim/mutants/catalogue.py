"""The bugs that the simulation must find: each is one that a server of this kind has had, or is easily given.

A mutant's scene shows it. It was drawn (``python -m tests.sim.explore --mutant NAME``) and made small.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.sim.mutants.mutate import Mutant
from tests.sim.schedules import Client, Fault, Schedule


def scene(*parts: Client | Fault, **changes: Any) -> Schedule:
    """Clients and faults in the plainest of worlds, but for ``changes``."""
    clients = tuple(part for part in parts if isinstance(part, Client))
    faults = tuple(part for part in parts if isinstance(part, Fault))
    return replace(Schedule(1, 1, 8, 200, prefix_cache=False, fallback=True, clients=clients, faults=faults), **changes)


CLIENT = Client(at_s=0.0, num_prompt=20, max_tokens=20, prompt=0, leaves_after_s=None)

MUTANTS = [
    # ------------------------------------------------------------------------------------------- who may still write or read
    Mutant(
        "decode frees its blocks before the writer has quiesced",
        "disagg.router",
        {
            """                dispatch.move(HandoffEvent.QUIESCE)
                dispatch.prefill.send(Abort(dispatch.id))
""": """                dispatch.move(HandoffEvent.QUIESCE)
                dispatch.prefill.send(Abort(dispatch.id))
                dispatch.decode.send(Abort(dispatch.id))
"""
        },
        scene(Client(0.3, 20, 20, 0, 0.4), Fault("hold", 0.3, 0, 0.5)),
    ),
    Mutant(
        "prefill frees blocks that are being copied",
        "disagg.prefill",
        {
            "        self._transports.cancel(dispatch_id)\n": """        self._transports.cancel(dispatch_id)
        self._release(dispatch.sequence)
"""
        },
        scene(Client(0.1, 20, 20, 0, 0.2), Fault("hold", 0.0, 1, 0.9)),
    ),
    Mutant(
        "a push ignores the peer's epoch",
        "disagg.handoff.memory",
        {"if known is None or known[0] != epoch:": "if known is None:"},
        scene(Client(0.4, 20, 20, 0, None), Client(0.0, 20, 41, 0, None), Fault("hold", 0.3, 1, 1.8), Fault("kill", 0.5, 1, 1.0)),
    ),
    Mutant(
        "decode begins before the bytes have arrived",
        "disagg.decode",
        {
            """        if dispatch.is_arriving:
            return
        match""": "        match"
        },
        scene(Client(0.1, 20, 20, 0, 0.2), Fault("hold", 0.0, 1, 0.9), is_two_sided=True),
    ),
    Mutant(
        "what an aborted hand-over left is kept as prefix cache",
        "disagg.decode",
        {
            "    dispatch.move(HandoffEvent.QUIESCED)\n": """    dispatch.move(HandoffEvent.QUIESCED)
                    received = dispatch.sequence.blocks[dispatch.sequence.num_computed // self._scheduler.block_size :]
                    self._scheduler.pool.use(received)
                    dispatch.sequence.num_computed = dispatch.num_tokens
                    self._scheduler.publish(dispatch.sequence)
"""
        },
        scene(Client(0.0, 41, 20, 0, None), Fault("lose", 0.2, 0, 0.8), is_two_sided=True, prefix_cache=True),
    ),
    # ----------------------------------------------------------------------------------------------- words that are not said
    Mutant(
        "prefill never says that it has quiesced",
        "disagg.prefill",
        {"            self._send(Quiesced(sequence.dispatch))\n": ""},
        scene(Client(0.1, 20, 20, 0, 0.2), Fault("hold", 0.0, 1, 0.9)),
    ),
    Mutant(
        "prefill never says that all is pushed",
        "disagg.prefill",
        {"self._send(Pushed(": "repr(Pushed("},
        scene(CLIENT),
    ),
    Mutant(
        "decode never says that it has quiesced",
        "disagg.decode",
        {"                self._send(Quiesced(dispatch_id))\n": ""},
        scene(Client(0.0, 20, 32, 0, 0.2)),
    ),
    Mutant(
        "an aborted receive is not forgotten",
        "disagg.decode",
        {"                self._transports.forget(message.dispatch)\n": ""},
        scene(Client(0.2, 20, 20, 0, 0.5), Fault("lag", 0.1, 2, 1.1), num_prefill=2, is_two_sided=True),
    ),
    Mutant(
        "the queue is not looked at when a worker has made room",
        "disagg.router",
        {"self._dispatch_queue()  # whatever the message was": "pass  # whatever the message was"},
        scene(CLIENT, is_two_sided=True),
    ),
    # ---------------------------------------------------------------------------------------------------------------- deaths
    Mutant(
        "prefill's death is ignored",
        "disagg.router",
        {
            """            if worker is dispatch.prefill:
                self._prefill_is_done(dispatch)
""": """            if worker is dispatch.prefill and dispatch.handoff is None:
                self._prefill_is_done(dispatch)
"""
        },
        scene(CLIENT, Fault("truncate", 0.3, 0, 1.4)),
    ),
    Mutant(
        "decode's death is not remembered",
        "disagg.router",
        {"            dispatch.is_decode_gone = dispatch.is_decode_gone or worker is dispatch.decode\n": ""},
        scene(CLIENT, Fault("drop", 0.0, 1, 0.5)),
    ),
    Mutant(
        "a retry forgets the tokens that the client has",
        "disagg.router",
        {"tokens, num_prompt = stream.all_tokens,": "tokens, num_prompt = list(stream.request.prompt),"},
        scene(CLIENT, Fault("lose", 0.2, 0, 0.8), is_two_sided=True),
    ),
    Mutant(
        "the tokens of an attempt that was given up are delivered",
        "disagg.router",
        {"            if dispatch is None or not dispatch.is_current:\n": "            if dispatch is None:\n"},
        scene(Client(0.3, 20, 20, 0, 0.1), Fault("truncate", 0.38, 1, 0.3, is_inbound=True), num_decode=2),
    ),
    Mutant(
        "a probe outlives the prefill worker that it was to prove",
        "disagg.pairs",
        {"            elif worker is probe.pair.prefill:": "            elif False:"},
        scene(
            Client(0.248, 20, 20, 0, None),
            Fault("drop", 0.251, 0, 1.1),
            Fault("reorder", 0.478, 0, 0.7),
            num_prefill=2,
            fallback=False,
        ),
    ),
    Mutant(
        "a probe is sent to the next life of its prefill worker",
        "disagg.pairs",
        {"case Reserved() if not self._is_current(pair):": "case Reserved() if False:"},
        scene(CLIENT, Fault("lag", 0.3, 1, 1.5), Fault("vanish", 0.6, 0, 0.0), Fault("kill", 0.823, 0, 0.0), fallback=False),
    ),
    # ----------------------------------------------------------------------------------------------------------- the channel
    Mutant(
        "a gap in the channel is ignored",
        "disagg.channel",
        {"        if number > self.num_taken:\n": "        if False:\n"},
        scene(CLIENT, Client(0.0, 20, 59, 0, None), Fault("reorder", 0.5, 2, 1.2), num_decode=2),
    ),
    Mutant(
        "a frame told twice is delivered twice",
        "disagg.channel",
        {"                if number < self.num_taken:": "                if False:"},
        scene(Client(0.3, 20, 20, 0, None), Fault("duplicate", 0.0, 0, 1.3, is_inbound=True), is_two_sided=True),
    ),
    Mutant(
        "a message lost with none behind it goes unnoticed",
        "disagg.supervisor",
        {"        return lacking_s if self._num_overdue > 1 else None\n": "        return None\n"},
        scene(Client(0.4, 20, 20, 0, None), Fault("truncate", 0.3, 1, 1.2, is_inbound=True), num_decode=2),
    ),
    Mutant(
        "a worker in a long step is taken for one that lost a message",
        "disagg.supervisor",
        {"self._num_overdue > 1": "self._num_overdue > 0"},
        scene(Client(0.5, 20, 20, 0, None), Fault("lag", 0.47, 0, 1.5), Fault("stall", 0.6, 0, 1.5)),
    ),
    Mutant(
        "a commit said twice begins twice",
        "disagg.decode",
        {
            " or dispatch.state is not HandoffState.PUSHING or dispatch.waiting is not None:": ":",
            "case Commit() as commit if dispatch.state is HandoffState.PUSHING:": "case Commit() as commit:",
        },
        scene(Client(0.059, 46, 20, 0, None), Client(0.1, 3, 20, 0, None), Fault("repeat", 0.11, 1, 0.2, is_inbound=True)),
    ),
    # ---------------------------------------------------------------------------------------------------- blocks and batches
    Mutant(
        "reservations leave running streams no blocks to grow into",
        "disagg.decode",
        {"            spare=GROWTH_BLOCKS * (num_running + self._num_reserved),\n": "            spare=0,\n"},
        scene(
            Client(0.5, 20, 20, 0, None),
            Client(0.4, 55, 20, 0, None),
            Client(0.1, 20, 40, 0, None),
            num_prefill=2,
            num_blocks=40,
            chunk_tokens=3,
        ),
    ),
    Mutant(
        "reservations outrank preempted streams",
        "disagg.decode",
        {"        if scheduler.waiting or num_running": "        if num_running"},
        scene(
            Client(0.2, 20, 35, 0, None),
            Client(0.5, 20, 20, 0, None),
            Client(0.243, 60, 20, 0, None),
            Client(0.2, 20, 42, 0, None),
            num_blocks=40,
        ),
    ),
    Mutant(
        "an aborted reservation keeps its place in the batch",
        "disagg.decode",
        {
            """                dispatch.move(HandoffEvent.QUIESCE)
                self._num_reserved -= 1
""": "                dispatch.move(HandoffEvent.QUIESCE)\n"
        },
        scene(CLIENT),
    ),
    Mutant(
        "a preempted stream says its last token twice",
        "disagg.engine.scheduler",
        {
            """        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.num_computed""": """        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.tokens.pop()
        sequence.blocks, sequence.num_computed"""
        },
        scene(Client(0.2, 20, 35, 0, None), Client(0.243, 60, 20, 0, None), Client(0.2, 20, 42, 0, None), num_blocks=40),
    ),
    Mutant(
        "a block that is not whole is published",
        "disagg.engine.scheduler",
        {"    num_whole = sequence.num_computed //": "    num_whole = len(sequence.tokens) //"},
        scene(CLIENT, prefix_cache=True, chunk_tokens=3),
    ),
]
