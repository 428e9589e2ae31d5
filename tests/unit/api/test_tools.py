"""Tools and forms in requests: what is asked of the engine, what is refused and why, and how calls are answered."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken

from disagg.api.services import Services
from disagg.api.structured import Form, refused
from disagg.errors import GrammarError
from disagg.grammar import Compiler
from disagg.messages import TokenOutput
from disagg.request import Request
from disagg.text.chat_template import load_chat_template
from disagg.text.grammar_vocabulary import grammar_vocabulary
from disagg.text.null_vocabulary import NullVocabulary
from disagg.text.tokenizer import Tokenizer
from disagg.text.tools import LLAMA3, MISTRAL_V11, MISTRAL_V13, ToolFormat, ToolSupport, tool_support
from tests.unit.api.fakes import EOS, FILES, TOKENIZER, FakeRouter, Script, async_test, end, says, serving, tokens
from tests.unit.api.test_chat import RecordingTemplate

VOCABULARY = grammar_vocabulary(TOKENIZER)
TEMPLATE = load_chat_template(FILES, TOKENIZER)
assert TEMPLATE is not None
SUPPORT = tool_support("auto", TEMPLATE.source, TOKENIZER)
COMPILER = Compiler(VOCABULARY)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "of a city", "parameters": SCHEMA}}
PING = {"type": "function", "function": {"name": "ping"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
ASK = [{"role": "user", "content": "hi"}]


class LocalForms:
    """Tries forms out in this process; the tests' own are harmless."""

    def __init__(self, compiler: Compiler = COMPILER) -> None:
        self._compiler = compiler

    async def check(self, form: Form) -> None:
        for part in form.parts:
            await self.check(part)
        try:
            self._compiler.check(form.grammar)
        except GrammarError as error:
            raise refused(form.param, str(error)) from error


def able(**changes: Any) -> dict[str, Any]:
    """The services of a server with llguidance and a model that calls tools."""
    return {"forms": LocalForms(), "tools": SUPPORT, "max_model_len": 4096, **changes}


def follows(request: Request, text: str) -> bool:
    """Whether the request's grammar lets ``text`` be the whole answer."""
    assert request.params.grammar is not None
    matcher = COMPILER.matcher(request.params.grammar, request.params.stop_token_ids)
    for byte in text.encode():
        if matcher.is_complete or not matcher.allowed(may_stop=True)[byte]:
            return False
        matcher.read([byte])
    return matcher.is_complete or bool(matcher.allowed(may_stop=True)[EOS])


FORMS = [
    ({"response_format": {"type": "json_object"}}, '{"a": 1}', "1"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, '{"city": "Ulm"}', "{}"),
    ({"structured_outputs": {"json": SCHEMA}}, '{"city": "Ulm"}', "{}"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '{"city": "Ulm"}', "{}"),
    ({"structured_outputs": {"json_object": True}}, "{}", "[]"),
    ({"structured_outputs": {"regex": "a+"}}, "aa", "b"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "maybe"),
    ({"structured_outputs": {"grammar": 'start: "x"+'}}, "xx", "y"),
    ({"guided_json": SCHEMA}, '{"city": "Ulm"}', "{}"),
    ({"guided_regex": "a+"}, "aa", "b"),
    ({"guided_choice": ["yes", "no"]}, "no", "maybe"),
    ({"guided_grammar": 'root ::= "x"+'}, "xx", "y"),
]


@async_test
async def test_every_way_to_ask_for_a_form_reaches_the_engine() -> None:
    """On both endpoints and for every choice: the grammar allows what was asked for, and refuses what was not."""
    router = FakeRouter(says("x"))
    async with serving(router, **able()) as client:
        for fields, good, bad in FORMS:
            await client.chat(**fields, n=2)
            await client.complete(prompt="hi", **fields)
            for stream in router.streams[-3:]:
                assert follows(stream.request, good), fields
                assert not follows(stream.request, bad), fields
        await client.chat(response_format={"type": "text"})
        assert router.streams[-1].request.params.grammar is None


FAULTY_FORMS = [
    ({"response_format": {"type": "yaml"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}}}, "response_format", "thing"),
    ({"guided_json": "{"}, "guided_json", "JSON"),
    ({"guided_regex": "[a"}, "guided_regex", ""),
    ({"guided_choice": []}, "guided_choice", "nothing"),
    ({"guided_grammar": "start: nowhere"}, "guided_grammar", "nowhere"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "structured_outputs.regex"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format", "guided_regex"),
    ({"guided_choice": ["x" * 200_000]}, "guided_choice", "characters"),
    ({"guided_grammar": "x" * 200_000}, "guided_grammar", "characters"),
    ({"guided_regex": "[a", "tools": [PING]}, "guided_regex", ""),
    (
        {"guided_regex": "a", "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]},
        "tools",
        "not",
    ),
]


@async_test
async def test_a_faulty_form_is_a_400_that_says_what_is_wrong() -> None:
    """Naming the field; nothing is submitted."""
    router = FakeRouter()
    async with serving(router, **able()) as client:
        for fields, param, reason in FAULTY_FORMS:
            error = await client.refused("/v1/chat/completions", {"messages": ASK, **fields})
            assert error["param"] == param, fields
            assert reason in error["message"], error
    assert router.streams == []


@async_test
async def test_without_llguidance_forms_are_refused_with_the_way_out() -> None:
    """A server that was installed without it says how to get it, and serves everything else."""
    async with serving(FakeRouter(says("x")), **able(forms=None)) as client:
        for fields in ({"guided_regex": "a"}, {"response_format": {"type": "json_object"}}):
            error = await client.refused("/v1/completions", {"prompt": "hi", **fields})
            assert "pip install" in error["message"]
        error = await client.refused("/v1/chat/completions", {"messages": ASK, "tools": [WEATHER], "tool_choice": "required"})
        assert "llguidance" in error["message"]
        await client.chat(tools=[WEATHER])


@async_test
async def test_a_call_is_answered_as_a_call() -> None:
    """Content before it, id, type, name and the arguments' text; finish_reason says so; usage counts its tokens."""
    async with serving(FakeRouter(says("Let me look. " + CALL)), **able()) as client:
        answer = await client.chat(tools=[WEATHER, PING])
        (choice,) = answer["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert choice["message"]["content"] == "Let me look."
        assert choice["finish_reason"] == "tool_calls"
        assert (call["type"], call["function"]) == ("function", {"name": "get_weather", "arguments": '{"city": "Zürich"}'})
        assert call["id"].startswith("call_")
        assert answer["usage"]["completion_tokens"] == len(("Let me look. " + CALL).encode()) + 1
        (choice,) = (await client.chat(tools=[WEATHER], tool_choice="none"))["choices"]
        assert choice["message"] == {"role": "assistant", "content": "Let me look. " + CALL}
        assert choice["finish_reason"] == "stop"


@async_test
async def test_a_call_streams_as_deltas() -> None:
    """Id, type and name come once and first, arguments in fragments after; nothing empty is sent; the same call as whole."""
    async with serving(FakeRouter(says("Yes. " + CALL + "\n" + CALL)), **able()) as client:
        chunks = [event["choices"][0] for event in await client.chat_events(tools=[WEATHER])]
        whole = (await client.chat(tools=[WEATHER]))["choices"][0]["message"]["tool_calls"]
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == "Yes."
    entries = [entry for chunk in chunks for entry in chunk["delta"].get("tool_calls", [])]
    firsts = [entry for entry in entries if "id" in entry]
    assert [(entry["index"], entry["type"], entry["function"]["name"]) for entry in firsts] == [
        (0, "function", "get_weather"),
        (1, "function", "get_weather"),
    ]
    assert len({entry["id"] for entry in firsts}) == 2
    for index in (0, 1):
        fragments = [entry["function"]["arguments"] for entry in entries if entry["index"] == index]
        assert "".join(fragments) == whole[index]["function"]["arguments"] == '{"city": "Zürich"}'
        assert len(fragments) > 5
    assert all(set(entry) == {"index", "function"} for entry in entries if "id" not in entry)
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["tool_calls"]
    assert all(chunk["delta"] or chunk["finish_reason"] for chunk in chunks), "an empty chunk"


@async_test
async def test_a_call_that_is_cut_ends_with_length() -> None:
    """max_tokens inside the arguments: what there was of them, and the true reason."""
    async with serving(FakeRouter(says(CALL)), **able()) as client:
        (choice,) = (await client.chat(tools=[WEATHER], max_tokens=CALL.index("Z") + 1))["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Z'


@async_test
async def test_without_parallel_calls_the_answer_ends_after_one() -> None:
    """The rest of the work is stopped: nothing of a second call is told."""
    router = FakeRouter(says(CALL + CALL))
    async with serving(router, **able()) as client:
        (choice,) = (await client.chat(tools=[WEATHER], parallel_tool_calls=False))["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    assert (router.stopped, router.aborted) == (router.streams, [])


@async_test
async def test_logprobs_and_ids_of_a_call_are_those_of_its_tokens() -> None:
    """What is taken out of the content is still counted, logged and returned."""
    async with serving(FakeRouter(says(CALL)), **able()) as client:
        (choice,) = (await client.chat(tools=[WEATHER], logprobs=True, return_token_ids=True))["choices"]
    logged = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert logged.decode() == CALL
    assert choice["token_ids"] == [*CALL.encode(), EOS]


@async_test
async def test_a_stop_string_cuts_before_calls_are_read() -> None:
    """The text is cut first: what is left of a call is content, and the stop string is the reason."""
    async with serving(FakeRouter(says("ok " + CALL)), **able()) as client:
        (choice,) = (await client.chat(tools=[WEATHER], stop='"name"'))["choices"]
    assert choice["message"] == {"role": "assistant", "content": "ok <tool_call>\n{"}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", '"name"')


@async_test
async def test_required_and_named_tools_are_forced_by_a_grammar() -> None:
    """required: one of the tools or several; a named one: that, once. The arguments follow its schema."""
    router = FakeRouter(says("x"))
    ping = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    bad = CALL.replace("city", "town")
    async with serving(router, **able()) as client:
        await client.chat(tools=[WEATHER, PING], tool_choice="required")
        required = router.streams[-1].request
        await client.chat(tools=[WEATHER, PING], tool_choice="required", parallel_tool_calls=False)
        single = router.streams[-1].request
        await client.chat(tools=[WEATHER, PING], tool_choice={"type": "function", "function": {"name": "ping"}})
        named = router.streams[-1].request
        await client.chat(tools=[WEATHER, PING])
    assert [follows(required, text) for text in (CALL, ping, f"{CALL}\n{ping}", "hi", bad)] == [True, True, True, False, False]
    assert [follows(single, text) for text in (CALL, ping, f"{CALL}\n{ping}")] == [True, True, False]
    assert [follows(named, text) for text in (CALL, ping, f"{ping}\n{ping}")] == [False, True, False]
    assert router.streams[-1].request.params.grammar is None
    jsonschema.validate({"city": "Zürich"}, SCHEMA)


@async_test
async def test_with_tools_and_a_form_the_answer_is_calls_or_of_that_form() -> None:
    """auto: one or the other and nothing else; none: the form; required or a named tool: calls, whatever the form says."""
    router = FakeRouter(says("x"))
    ping = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    named = {"type": "function", "function": {"name": "ping"}}
    texts = ['{"city": "Ulm"}', CALL, ping, f"{CALL}\n{ping}", '{"town": 1}', "hi", "", f'{ping}{{"city": "Ulm"}}']
    expected = {
        "auto": [True, True, True, True, False, False, False, False],
        "none": [True, False, False, False, False, False, False, False],
        "required": [False, True, True, True, False, False, False, False],
        "named": [False, False, True, False, False, False, False, False],
    }
    form = {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {**SCHEMA, "additionalProperties": False}},
        }
    }
    async with serving(router, **able()) as client:
        for choice, allowed in expected.items():
            await client.chat(tools=[WEATHER, PING], tool_choice=named if choice == "named" else choice, **form)
            assert [follows(router.streams[-1].request, text) for text in texts] == allowed, choice
        await client.chat(tools=[WEATHER, PING], parallel_tool_calls=False, **form)
        assert [follows(router.streams[-1].request, text) for text in texts[1:4]] == [True, True, False]
        for others in ({"guided_choice": ["yes", "no"]}, {"guided_grammar": 'start: call\ncall: "yes" | "no"'}):
            await client.chat(tools=[PING], **others)
            assert [follows(router.streams[-1].request, text) for text in ("no", ping, "call")] == [True, True, False]


@async_test
async def test_an_answer_of_a_form_holds_no_calls() -> None:
    """Where the answer is calls or a form, text within the form that looks like a call stays what it is."""
    text = f"see {CALL}"
    async with serving(FakeRouter(says(text)), **able()) as client:
        (choice,) = (await client.chat(tools=[WEATHER], guided_regex="(.|\n)*"))["choices"]
        assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": text}, "stop")
    async with serving(FakeRouter(says(CALL)), **able()) as client:
        (choice,) = (await client.chat(tools=[WEATHER], response_format={"type": "json_object"}))["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")


@async_test
async def test_a_model_whose_calls_are_bare_json_says_why_it_cannot_have_both() -> None:
    """Llama 3: a form beside tools is a 400 with the way out; either alone is served."""
    async with serving(FakeRouter(says("x")), **able(tools=ToolSupport(LLAMA3, {}))) as client:
        body = {"messages": ASK, "tools": [PING], "response_format": {"type": "json_object"}}
        error = await client.refused("/v1/chat/completions", body)
        assert (error["param"], error["code"]) == ("response_format", "unsupported_value")
        assert "bare JSON" in error["message"]
        for choice in ("none", "required"):
            await client.chat(**{**body, "tool_choice": choice})


@pytest.mark.parametrize(
    ("form", "call"),
    [
        (MISTRAL_V13, '[TOOL_CALLS]{name}[ARGS]{"a": 1}'),
        (MISTRAL_V11, '[TOOL_CALLS]{name}[CALL_ID]Ab3dEf6hi[ARGS]{"a": 1}'),
    ],
    ids=["v13", "v11"],
)
@async_test
async def test_newer_mistral_models_are_forced_and_read_in_their_own_way(form: ToolFormat, call: str) -> None:
    """The name stands before the arguments; of names that begin alike each is its own; ids are nine letters and digits."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("get", "get_all")]
    one, other = call.replace("{name}", "get"), call.replace("{name}", "get_all")
    router = FakeRouter(says(other + one))
    async with serving(router, **able(tools=ToolSupport(form, {}))) as client:
        (choice,) = (await client.chat(tools=tools, tool_choice="required"))["choices"]
        request = router.streams[-1].request
        chunks = [event["choices"][0] for event in await client.chat_events(tools=tools, tool_choice="required")]
    texts = (
        one,
        other,
        one + other,
        one.replace("get", "got"),
        one.replace("get", "get_a"),
        '[{"name": "get", "arguments": {"a": 1}}]',
    )
    assert [follows(request, text) for text in texts] == [True, True, True, False, False, False]
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [{"name": name, "arguments": '{"a": 1}'} for name in ("get_all", "get")]
    assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in calls)
    entries = [entry for chunk in chunks for entry in chunk["delta"].get("tool_calls", [])]
    for index, call in enumerate(calls):
        fragments = [entry["function"]["arguments"] for entry in entries if entry["index"] == index]
        assert "".join(fragments) == call["function"]["arguments"]


@async_test
async def test_markers_that_are_control_tokens_are_forced_and_seen_as_such() -> None:
    """Their own ids and not their spelling; between them the name and the arguments are text."""
    backend = NullVocabulary().backend()
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in ("[TOOL_CALLS]", "[ARGS]")])
    tokenizer = Tokenizer(backend, eos_token_ids=(EOS,))
    source = "{% if tools %}[TOOL_CALLS]{{ name }}[ARGS]{% endif %}"
    support = tool_support("auto", source, tokenizer)
    assert support is not None
    written = [259, *b"ping", 260, *b"{}"]
    outputs = [TokenOutput(dispatch=0, token=token) for token in written]
    template = RecordingTemplate()
    template.source = source
    router = FakeRouter(lambda _request: [*([output] for output in outputs), [end()]])
    compiler = Compiler(grammar_vocabulary(tokenizer))
    changes = {"tokenizer": tokenizer, "vocab_size": tokenizer.vocab_size, "chat_template": template}
    async with serving(router, **able(tools=support, forms=LocalForms(compiler), **changes)) as client:
        (choice,) = (await client.chat(tools=[PING], tool_choice="required"))["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "ping", "arguments": "{}"}
    assert choice["message"]["content"] is None
    params = router.streams[-1].request.params
    assert params.grammar is not None
    matcher = compiler.matcher(params.grammar, params.stop_token_ids)
    for token in written:
        allowed = matcher.allowed(may_stop=True)
        assert allowed[token]
        assert not allowed[ord("[")]
        matcher.read([token])
    assert matcher.allowed(may_stop=True)[[259, EOS]].all(), "another call, or the end"


@async_test
async def test_arguments_that_are_forced_are_objects() -> None:
    """A schema that leaves their type open is one of an object all the same."""
    router = FakeRouter(says("x"))
    schemas: list[dict[str, Any]] = [
        {"properties": {"a": {"type": "integer"}}},
        {"anyOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"type": "null"}]},
        {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"a": {"type": "integer"}}}}},
        {"type": ["object", "null"], "properties": {"a": {"type": "integer"}}},
    ]
    async with serving(router, **able()) as client:
        for schema in schemas:
            tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
            await client.chat(tools=[tool], tool_choice="required")
            call = '<tool_call>\n{"name": "f", "arguments": ARGUMENTS}\n</tool_call>'
            texts = [call.replace("ARGUMENTS", text) for text in ('{"a": 1}', '"a"', "null", "1")]
            assert [follows(router.streams[-1].request, text) for text in texts] == [True, False, False, False], schema


@async_test
async def test_the_template_gets_the_tools_and_earlier_calls() -> None:
    """As the client gave them, without empty fields; not with tool_choice none."""
    template = RecordingTemplate()
    template.source = TEMPLATE.source
    calls = [{"id": "c1", "type": "function", "function": {"name": "ping", "arguments": "{}"}}]
    history = [*ASK, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "pong", "tool_call_id": "c1"}]
    async with serving(FakeRouter(says("x")), **able(chat_template=template)) as client:
        await client.chat(tools=[WEATHER, PING], messages=history)
        await client.chat(tools=[WEATHER], tool_choice="none")
    (messages, options), (_, without) = template.calls
    assert options["tools"] == [WEATHER, PING]
    assert messages[1]["tool_calls"] == calls
    assert messages[2] == {"role": "tool", "content": "pong", "tool_call_id": "c1"}
    assert "tools" not in without


FAULTY_TOOLS = [
    ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [PING, PING]}, "tools[1].function.name"),
    ({"tools": [PING], "tool_choice": "always"}, "tool_choice"),
    ({"tools": [PING], "tool_choice": {"type": "function", "function": {"name": "pong"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [PING, {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
     "tools[1].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "description": "x" * 200_000}}}],
      "tool_choice": "required"}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {"type": "object"}}}}],
      "tool_choice": "required"}, "tools"),
]  # fmt: skip


@async_test
async def test_a_faulty_tool_is_named() -> None:
    """What is wrong with a tool or the choice of one is a 400 before any work."""
    router = FakeRouter()
    async with serving(router, **able()) as client:
        for fields, param in FAULTY_TOOLS:
            error = await client.refused("/v1/chat/completions", {"messages": ASK, **fields})
            assert error["param"] == param, error
    assert router.streams == []


@pytest.mark.parametrize("changes", [{"tools": None}, {"chat_template": RecordingTemplate()}], ids=["no parser", "no place"])
@async_test
async def test_a_model_without_tools_says_so(changes: dict[str, Any]) -> None:
    """No known way to call, or no place for tools in the prompt: 400 with the reason, rather than tools that nobody sees."""
    if "chat_template" in changes:
        changes["chat_template"].source = "{{ messages }}"
    async with serving(FakeRouter(says("x")), **able(**changes)) as client:
        error = await client.refused("/v1/chat/completions", {"messages": ASK, "tools": [PING]})
        assert (error["param"], error["code"]) == ("tools", "unsupported_value")
        assert "model" in error["message"]
        await client.chat(tools=[])
        await client.chat(tools=[PING], tool_choice="none")


@async_test
async def test_an_answer_that_its_grammar_completes_keeps_its_last_token() -> None:
    """The engine stops at an ordinary token where nothing may follow: it is text, and the reason is stop."""
    last = TokenOutput(dispatch=0, token=ord("o"), finish_reason="stop")
    script: Script = lambda _request: [tokens("n", None), [last]]  # noqa: E731
    async with serving(FakeRouter(script), **able()) as client:
        (choice,) = (await client.chat(guided_choice=["no"]))["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("no", "stop")
    assert end().finish_reason == "stop"


def test_services_have_neither_forms_nor_tools_by_default() -> None:
    """What the composition root does not give is not there: requests for it are refused, not ignored."""
    fields = Services.__dataclass_fields__
    assert (fields["forms"].default, fields["tools"].default) == (None, None)
