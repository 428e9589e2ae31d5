"""POST /tokenize and /detokenize, GET /tokenizer_info: the ids are those that a prompt of the same text would have."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.api.fakes import EOS, MODEL, TOKENIZER, FakeRouter, async_test, says, serving

USER = [{"role": "user", "content": "hi <|im_end|>"}]


class BeginningTokenizer:
    """The null tokenizer, as if its model wanted a token at the beginning."""

    bos_token_ids = (256,)

    def __getattr__(self, name: str) -> Any:
        return getattr(TOKENIZER, name)

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        return [*self.bos_token_ids, *TOKENIZER.encode(text)] if add_bos else TOKENIZER.encode(text)


async def ask(path: str, body: dict[str, Any], **services: Any) -> dict[str, Any]:
    async with serving(FakeRouter(says("x")), **services) as client:
        status, _, answer = await client.post(path, body)
        assert status == 200, answer
        return answer


@async_test
async def test_a_prompt_is_tokenised_as_completions_would() -> None:
    """Count, ids and the context's length; special tokens count in raw text; the vocabulary's own spelling on demand."""
    router = FakeRouter(says("x"))
    async with serving(router) as client:
        _, _, answer = await client.post("/tokenize", {"model": MODEL, "prompt": "a é<|im_end|>"})
        _, _, spelled = await client.post("/tokenize", {"prompt": " é", "return_token_strs": True})
        await client.complete(prompt="a é<|im_end|>")
    assert answer == {"count": 5, "max_model_len": 256, "tokens": router.streams[0].request.prompt, "token_strs": None}
    assert spelled["token_strs"] == ["Ġ", "Ã", "©"]


@async_test
async def test_messages_are_tokenised_as_chat_would() -> None:
    """The rendered prompt's ids, with and without the opening of the answer, also if they are more than the context."""
    router = FakeRouter(says("x"))
    async with serving(router) as client:
        _, _, answer = await client.post("/tokenize", {"messages": USER})
        _, _, bare = await client.post("/tokenize", {"messages": USER, "add_generation_prompt": False})
        status, _, long = await client.post("/tokenize", {"messages": [{"role": "user", "content": "x" * 300}]})
        await client.chat(messages=USER)
    assert answer["tokens"] == router.streams[0].request.prompt
    assert answer["tokens"].count(EOS) == 1  # what a participant wrote is no control token
    assert bare["count"] < answer["count"]
    assert (status, long["count"] > 300) == (200, True)


@async_test
async def test_a_beginning_belongs_to_prompts_and_is_the_templates_business_in_chats() -> None:
    """add_special_tokens is on for prompts and off for chats, as for the endpoints that generate."""
    tokenizer = BeginningTokenizer()
    for body, starts in (
        ({"prompt": "a"}, True), ({"prompt": "a", "add_special_tokens": False}, False),
        ({"messages": USER}, False), ({"messages": USER, "add_special_tokens": True}, True),
    ):  # fmt: skip
        answer = await ask("/tokenize", body, tokenizer=tokenizer)
        assert (answer["tokens"][0] == 256) == starts, body


@async_test
async def test_detokenize_gives_back_what_was_tokenised() -> None:
    """Special tokens included; no ids are no text."""
    text = "a é<|im_end|>\n"
    assert await ask("/detokenize", {"tokens": TOKENIZER.encode(text)}) == {"prompt": text}
    assert await ask("/detokenize", {"tokens": []}) == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "gpt-4"}, 404, "model"),
        ("/tokenize", {"prompt": "x" * 10_000}, 400, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 10_000}]}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role"),
        ("/tokenize", {"messages": USER, "chat_template": "x"}, 400, "chat_template"),
        ("/detokenize", {"tokens": [TOKENIZER.vocab_size]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "gpt-4"}, 404, "model"),
    ],
)
@async_test
async def test_what_cannot_be_tokenised_is_refused(path: str, body: dict[str, Any], status: int, param: str) -> None:
    """The same checks and the same words as for the endpoints that generate."""
    async with serving(FakeRouter()) as client:
        assert (await client.refused(path, body, status))["param"] == param


@pytest.mark.parametrize("has_template", [True, False])
@async_test
async def test_the_tokenizer_describes_itself(has_template: bool) -> None:
    """What a remote tokenizer needs: the special tokens' texts, the template's source, null where there is none."""
    async with serving(FakeRouter(), **({} if has_template else {"chat_template": None})) as client:
        status, info = await client.get("/tokenizer_info")
    assert status == 200
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<|im_start|>", "<|im_end|>", None)
    assert (info["add_bos_token"], info["model_max_length"]) == (False, 256)
    assert ("<|im_start|>" in (info["chat_template"] or "")) == has_template
