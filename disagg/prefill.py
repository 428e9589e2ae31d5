"""The prefill side of a worker: computes prompts, pushes their blocks into decode's while it goes on, samples the first token.

    Prefill ─▶ scheduler queue ─▶ chunk … chunk ─▶ Prefilled (first token, at once) ─▶ last blocks copied ─▶ Pushed
                                    └ finished blocks are pushed after each chunk, while the next one computes

Without a target the dispatch is colocated: the sequence stays in the scheduler and decodes here, on the same blocks.
An aborted dispatch stops between chunks; its blocks are released, and Quiesced is answered, when no copy of it is running.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from disagg.engine.base import Sequence
from disagg.engine.scheduler import Progress, Scheduler
from disagg.handoff.digest import BlockDigests
from disagg.handoff.protocol import HANDOFF_TABLE, HandoffEvent, HandoffState
from disagg.handoff.transport import Completed
from disagg.handoff.transports import Transports
from disagg.messages import Message, Prefill, Prefilled, Pushed, Quiesced, Target, TokenLogprobs
from disagg.request import advance


@dataclass(slots=True)
class _Dispatch:
    sequence: Sequence
    num_tokens: int  # to compute before the first token that is sampled here
    target: Target | None
    queued_at: float
    started_at: float = 0.0
    state: HandoffState = HandoffState.PUSHING
    num_pushed: int = 0  # blocks given to the transport, decode's cached ones included
    num_in_flight: int = 0  # pushes not completed
    is_prefilled: bool = False
    nbytes: int = 0
    copy_s: float = 0.0
    error: str | None = None
    digests: list[int] = field(default_factory=list)  # of the blocks given to the transport
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def move(self, event: HandoffEvent) -> None:
        self.state = advance(HANDOFF_TABLE, self.state, event)


class PrefillRole:
    """Owns every dispatch whose prompt is computed in this worker, until its bytes have left."""

    def __init__(
        self,
        scheduler: Scheduler,
        transports: Transports,
        send: Callable[[Message], None],
        clock: Callable[[], float],
        decode_here: Callable[[Sequence], None],
        block_digests: BlockDigests | None,
    ) -> None:
        """``decode_here`` takes over a colocated sequence after its first token.

        ``block_digests`` is for decode to verify what is pushed; None = it does not.
        """
        self._scheduler = scheduler
        self._transports = transports
        self._send = send
        self._clock = clock
        self._decode_here = decode_here
        self._block_digests = block_digests
        self._dispatches: dict[int, _Dispatch] = {}

    def __repr__(self) -> str:
        return "PrefillRole(" + ", ".join(f"{key} {d.state}" for key, d in self._dispatches.items()) + ")"

    def __contains__(self, dispatch: int) -> bool:
        return dispatch in self._dispatches

    def start(self, message: Prefill) -> None:
        sequence = Sequence(
            message.dispatch,
            list(message.tokens),
            message.params,
            num_prompt=message.num_prompt,
            priority=message.priority,
            prefill_only=message.target is not None,
        )
        dispatch = _Dispatch(sequence, len(message.tokens), message.target, queued_at=self._clock())
        if message.target is not None:
            dispatch.num_pushed = message.target.num_cached_blocks
        self._dispatches[message.dispatch] = dispatch
        self._scheduler.add(sequence)

    def before_step(self, sequence: Sequence) -> None:
        """The sequence is in the batch about to run."""
        dispatch = self._dispatches[sequence.dispatch]
        dispatch.started_at = dispatch.started_at or self._clock()

    def after_step(self, progress: Progress) -> None:
        """Push what a chunk has finished; after the last one, send the first token."""
        sequence, sample = progress.sequence, progress.sample
        dispatch = self._dispatches[sequence.dispatch]
        if sample.prompt_logprobs is not None:
            if progress.chunk.start == 0:
                dispatch.prompt_logprobs.clear()  # computed again after a preemption
            dispatch.prompt_logprobs += sample.prompt_logprobs
        if sequence.num_computed == dispatch.num_tokens:
            self._send_first_token(dispatch, progress)
            if dispatch.target is None and progress.finish_reason is None:
                self._decode_here(sequence)
        if dispatch.target is not None and progress.finish_reason is None:
            self._push(dispatch, dispatch.target)
        self._settle(dispatch)

    def copied(self, completed: Completed) -> None:
        """The transport has completed a push of one of this role's dispatches."""
        dispatch = self._dispatches[completed.dispatch]
        dispatch.num_in_flight -= 1
        dispatch.nbytes += completed.nbytes
        dispatch.copy_s += completed.seconds
        dispatch.error = dispatch.error or completed.error
        self._settle(dispatch)

    def abort(self, dispatch_id: int) -> None:
        """End a dispatch that is in this role; Quiesced follows as soon as nothing of it is being copied."""
        dispatch = self._dispatches[dispatch_id]
        if dispatch.state is not HandoffState.PUSHING:
            return  # told twice
        dispatch.move(HandoffEvent.QUIESCE)
        if not dispatch.is_prefilled:
            self._scheduler.remove(dispatch.sequence)
        self._transports.cancel(dispatch_id)
        self._settle(dispatch)

    def _send_first_token(self, dispatch: _Dispatch, progress: Progress) -> None:
        sequence = progress.sequence
        dispatch.is_prefilled = True
        wants_prompt = sequence.params.num_prompt_logprobs is not None
        self._send(
            Prefilled(
                sequence.dispatch,
                progress.output,
                sequence.num_cached or 0,
                dispatch.prompt_logprobs if wants_prompt else None,
                queue_s=dispatch.started_at - dispatch.queued_at,
                prefill_s=self._clock() - dispatch.started_at,
            )
        )

    def _push(self, dispatch: _Dispatch, target: Target) -> None:
        """Queue the blocks that are whole, and after the prompt's end the last one too, for copying."""
        sequence = dispatch.sequence
        end = len(sequence.blocks) if dispatch.is_prefilled else sequence.num_computed // self._scheduler.block_size
        begin = dispatch.num_pushed
        if end > begin:
            source = sequence.blocks[begin:end]
            if self._block_digests is not None:
                dispatch.digests += self._block_digests(source)
            self._transports.push(sequence.dispatch, target.peer, target.epoch, source, target.blocks[begin:end], target.key)
            dispatch.num_pushed = end
            dispatch.num_in_flight += 1

    def _settle(self, dispatch: _Dispatch) -> None:
        """Let the dispatch go once nothing of it is being computed or copied."""
        sequence = dispatch.sequence
        is_aborted = dispatch.state is HandoffState.QUIESCING
        if dispatch.num_in_flight or not (dispatch.is_prefilled or is_aborted):
            return
        del self._dispatches[sequence.dispatch]
        if is_aborted:
            dispatch.move(HandoffEvent.QUIESCED)
            self._release(sequence)
            self._send(Quiesced(sequence.dispatch))
        elif dispatch.target is not None:
            dispatch.move(HandoffEvent.PUSHED)
            self._release(sequence)
            self._send(Pushed(sequence.dispatch, dispatch.nbytes, dispatch.copy_s, dispatch.error, dispatch.digests))

    def _release(self, sequence: Sequence) -> None:
        self._scheduler.pool.release(sequence.blocks)
        sequence.blocks = []
