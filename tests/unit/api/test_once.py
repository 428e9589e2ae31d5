"""What a client wrote is rendered and tokenised once, however many choices it asks for and however it is answered."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.text.chat_template import ChatTemplate, load_chat_template
from tests.unit.api.fakes import FILES, TOKENIZER, FakeRouter, async_test, says, serving


class Counting:
    """Passes everything on, and counts the calls of some methods."""

    def __init__(self, target: Any, *counted: str) -> None:
        self._target = target
        self._counted = counted
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name in self._counted:
            self.calls.append(name)
        return getattr(self._target, name)


@pytest.mark.parametrize("extra", [{}, {"n": 3}, {"stream": True}], ids=["whole", "three choices", "streamed"])
@async_test
async def test_a_completions_prompt_is_tokenised_once(extra: dict[str, Any]) -> None:
    """Each prompt of a list once, in order; choices share its ids, and nothing tokenises a text again to count or to echo it."""
    tokenizer = Counting(TOKENIZER, "encode", "encode_trusted")
    router = FakeRouter(says("ok"))
    async with serving(router, tokenizer=tokenizer) as client:
        answer = await client.http.post("/v1/completions", json={"prompt": ["one", "two"], "echo": True, **extra})
        assert (answer.status, await answer.read() != b"") == (200, True)
    assert tokenizer.calls == ["encode", "encode"]
    assert len(router.streams) == 2 * extra.get("n", 1)


@pytest.mark.parametrize("extra", [{}, {"n": 3}, {"stream": True}], ids=["whole", "three choices", "streamed"])
@async_test
async def test_a_chat_is_rendered_and_tokenised_once(extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One rendering and one tokenisation of what it gave, for all choices."""
    calls: list[str] = []
    for name in ("encode", "encode_trusted"):
        inner = getattr(type(TOKENIZER), name)

        def counted(self: Any, *args: Any, name: str = name, inner: Any = inner, **kwargs: Any) -> Any:
            calls.append(name)
            return inner(self, *args, **kwargs)

        monkeypatch.setattr(type(TOKENIZER), name, counted)
    template: ChatTemplate = load_chat_template(FILES, TOKENIZER)
    rendering = Counting(template, "encode")
    router = FakeRouter(says("ok"))
    async with serving(router, chat_template=rendering) as client:
        body = {"messages": [{"role": "user", "content": "hi"}], **extra}
        answer = await client.http.post("/v1/chat/completions", json=body)
        assert (answer.status, await answer.read() != b"") == (200, True)
    assert rendering.calls == ["encode"]
    assert calls.count("encode_trusted") == 1
    assert len(calls) - calls.count("encode_trusted") <= 1, "encode_trusted may use encode, and nobody else does"
    assert len(router.streams) == extra.get("n", 1)
