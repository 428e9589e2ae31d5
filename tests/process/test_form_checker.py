"""The process that tries forms out: what takes long, dies, hangs or is left costs its own client only."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable

import psutil
import pytest

from disagg import grammar
from disagg.api import form_checker
from disagg.api.form_checker import FormChecker
from disagg.api.structured import Form
from disagg.errors import InvalidRequestError, UnavailableError
from tests.process.harness import DEADLINE_S


@pytest.fixture
async def checker() -> AsyncIterator[FormChecker]:
    made = FormChecker("null")
    yield made
    await made.aclose()
    assert processes() == []


def processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "disagg.grammar_process" in child.cmdline()]


def fine(text: str) -> Form:
    return Form(grammar.regex(text), "guided_regex")


def slow(mark: object) -> Form:
    """Compiles for minutes."""
    schema = {"allOf": [{"type": "string", "pattern": f".*{index}.*{mark}"} for index in range(60)]}
    return Form(grammar.json_schema(schema), "guided_json")


def overflowing() -> Form:
    """Ends its process by a stack overflow."""
    rules = [f"r{index}: r{index + 1}? r{index + 1}?" for index in range(3000)]
    return Form(grammar.lark("\n".join(["start: r0", *rules, 'r3000: "a"'])), "guided_grammar")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - what other processes do has no event here
            await asyncio.sleep(0.01)


async def test_what_takes_too_long_or_kills_is_refused_and_costs_no_process(checker: FormChecker) -> None:
    """Each is a 400 that blames its field, the second time without another try; the next form finds the same process."""
    await checker.check(fine("a+"))
    (process,) = processes()
    for form in (slow(0), overflowing(), slow(0), overflowing()):
        with pytest.raises(InvalidRequestError, match="too long to compile") as caught:
            await checker.check(form)
        assert caught.value.param == form.param
    await checker.check(fine("b+"))
    assert processes() == [process]


async def test_of_a_form_that_was_put_together_the_faulty_part_is_blamed(checker: FormChecker) -> None:
    """Each part by its own field, before the whole by its own."""
    broken = Form(grammar.regex("[a"), "tools")
    whole = Form(grammar.either('start: "x" | @other', broken.grammar), "response_format", parts=(fine("a"), broken))
    with pytest.raises(InvalidRequestError) as caught:
        await checker.check(whole)
    assert caught.value.param == "tools"


async def test_one_form_of_many_clients_is_tried_once(checker: FormChecker) -> None:
    """Whoever waits for its turn finds the answer there: it passes, or it is refused, for all of them."""
    await checker.check(fine("a+"))
    process = checker._process
    assert process is not None
    before = process._num_asked
    await asyncio.gather(*(checker.check(fine("b+")) for _ in range(50)))
    assert process._num_asked == before + 1
    results = await asyncio.gather(*(checker.check(slow(1)) for _ in range(10)), return_exceptions=True)
    assert [type(result) for result in results] == [InvalidRequestError] * 10
    assert process._num_asked <= before + 1 + 10 + 1, "quickly each, slowly one"


async def test_those_that_take_long_wait_for_each_other_and_not_for_everybody(checker: FormChecker) -> None:
    """A form that compiles at once passes while several slow ones are still waiting."""
    await checker.check(fine("a+"))
    waiting = [asyncio.create_task(checker.check(slow(mark))) for mark in range(6)]
    await asyncio.sleep(0)
    await checker.check(fine("b+"))
    assert sum(not task.done() for task in waiting) >= 3
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [InvalidRequestError] * 6


async def test_a_client_that_leaves_ends_nothing(checker: FormChecker) -> None:
    """Neither the process that still reads the vocabulary, nor the one that tries its form."""
    await checker.start()
    await until(lambda: bool(processes()))  # it has become what it is to be
    (process,) = processes()
    for form in (fine("a+"), slow(2)):
        leaving = asyncio.create_task(checker.check(form))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await checker.check(fine("b" + form.param))
        assert processes() == [process]


async def test_its_death_is_told_to_those_that_wait_and_to_nobody_else(checker: FormChecker) -> None:
    """503 for the form that it had; the next one is tried by the next process."""
    await checker.check(fine("a+"))
    (process,) = processes()
    waiting = asyncio.create_task(checker.check(slow(3)))
    await until(lambda: bool(process.children()))
    process.kill()
    with pytest.raises(UnavailableError, match="has ended"):
        await waiting
    await checker.check(fine("b+"))
    assert processes() != [process]


async def test_one_that_hangs_is_ended(checker: FormChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its limit it is killed; the next form is tried by the next process."""
    await checker.check(fine("a+"))
    (process,) = processes()
    monkeypatch.setattr(form_checker, "_HANG_S", 0.2)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(UnavailableError):
        await checker.check(fine("b+"))
    monkeypatch.undo()
    await checker.check(fine("b+"))
    assert processes() != [process]


async def test_it_ends_with_all_that_it_started(checker: FormChecker) -> None:
    """Closing leaves no process behind, whatever was being tried, and may be done twice."""
    await checker.check(fine("a+"))
    (process,) = processes()
    waiting = asyncio.create_task(checker.check(slow(4)))
    await until(lambda: len(process.children(recursive=True)) == 2)
    children = process.children(recursive=True)
    await checker.aclose()
    await checker.aclose()
    with pytest.raises(UnavailableError):
        await waiting
    await until(lambda: not any(child.is_running() for child in children))
    assert processes() == []
