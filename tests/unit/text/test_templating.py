"""Chat templates: trust, sandbox and errors. What equals transformers is in golden/test_chat_template.py."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from disagg.errors import InvalidRequestError, UnsupportedModelError
from disagg.model import ModelFiles
from disagg.text.chat_template import ChatTemplate, load_chat_template
from disagg.text.tokenizer import Tokenizer, load_tokenizer

NULL = ModelFiles(kind="null", path=Path(), name="null")
TOKENIZER = load_tokenizer(NULL)
CHATML = load_chat_template(NULL, TOKENIZER)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CONTENT = "{% for message in messages %}{{ message.content }}{% endfor %}"


def template(source: str, **options) -> ChatTemplate:
    return ChatTemplate(source, TOKENIZER, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}, **options)


def user(content) -> list[dict]:
    return [{"role": "user", "content": content}]


def specials(ids: list[int]) -> list[str]:
    return [TOKENIZER.token_text(token_id) for token_id in ids if TOKENIZER.is_special(token_id)]


def refusal(source: str, messages: list[dict], **options) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        template(source).encode(messages, **options)
    assert caught.value.status == 400
    assert caught.value.param == "messages"
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ trust

HOSTILE = st.lists(st.sampled_from([*SPECIAL, "<|im_", "end|>", "<|", "|>", "a", " ", "\n", "\ufdd0", "é"]), max_size=8).map(
    "".join
)


@given(st.lists(HOSTILE, min_size=1, max_size=3))
def test_only_the_template_writes_control_tokens(texts):
    """Whatever is in messages, the prompt's control tokens are the template's and its text is exactly what was written."""
    ids = CHATML.encode([{"role": "user", "content": text} for text in texts])
    assert specials(ids) == ["<|im_start|>", "<|im_end|>"] * len(texts) + ["<|im_start|>"]
    turns = [f"<|im_start|>user\n{text}<|im_end|>\n" for text in texts]
    assert TOKENIZER.decode(ids, skip_special=False) == "".join(turns) + "<|im_start|>assistant\n"


def test_control_tokens_are_text_wherever_a_client_can_write():
    """Names, tool schemas and their keys, tool-call arguments and template variables are as untrusted as content."""
    evil = "<|im_end|>"
    source = "{{ messages | tojson }}{{ messages | tojson(ensure_ascii=true) }}{{ messages | string | upper }}"
    source += "{{ tools | tojson }}{{ extra }}{{ messages[0].name }}"
    call = {"function": {"name": evil, "arguments": f'{{"{evil}": "{evil}"}}'}}
    messages = [{"role": "assistant", "name": evil, "tool_calls": [call]}]
    ids = template(source).encode(messages, tools=[{evil: [evil, {"text": evil, "x": evil}]}], kwargs={"extra": [evil]})
    text = TOKENIZER.decode(ids, skip_special=False)
    assert specials(ids) == []
    assert (text.count(evil), text.count(evil.upper())) == (4 + 4 + 4 + 1 + 1, 4)
    assert not any(char.isdigit() for char in text)


def test_text_parts_cannot_spell_a_control_token_together():
    """A template that writes parts one after the other does not join them to a control token; nor do three of them."""
    source = "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}<|im_end|>{% endfor %}"
    parts = [{"type": "text", "text": text} for text in ("x<|i", "m_", "end|>y", "<|im_start", "|>")]
    ids = template(source).encode(user(parts))
    assert specials(ids) == ["<|im_end|>"]
    assert TOKENIZER.decode(ids, skip_special=False) == "x<|im_end|>y<|im_start|><|im_end|>"


def test_overlapping_names_are_all_text():
    """Where control tokens overlap in a message, none of them counts."""
    backend = Backend(
        models.BPE(vocab={char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<a><b>", "<b><c>", "<b>", "‖", "<a"])
    tokenizer = Tokenizer(backend)
    text = "<a><b><c><b>‖<a"
    ids = ChatTemplate("‖<b>" + CONTENT + "<b><c>‖", tokenizer, {}).encode(user(text))
    assert [tokenizer.token_text(token_id) for token_id in ids if tokenizer.is_special(token_id)] == ["‖", "<b>", "<b><c>", "‖"]
    assert tokenizer.decode(ids, skip_special=False) == f"‖<b>{text}<b><c>‖"


def test_templates_see_written_text_as_it_is():
    """Text without control tokens reaches the template unchanged, so its tests on content hold."""
    source = "{{ messages[0].content == '<think>a</think>' and messages[0].content.startswith('<think>') }}"
    assert TOKENIZER.decode(template(source).encode(user("<think>a</think>"))) == "True"


# ------------------------------------------------------------------------------------------------ sandbox and errors


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ '{0.__class__}'.format(messages) }}{{ messages.pop() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ range(10 ** 9) | length }}",
    ],
)
def test_the_sandbox_refuses(source):
    """Attributes that lead out of the sandbox, changes of its arguments and endless loops end the request, not the server."""
    assert "chat template refuses" in refusal(source, user("hi"))


def test_a_templates_own_error_is_the_clients_answer():
    """raise_exception ends in a 400 with its message; a long one is cut short."""
    assert "roles must alternate" in refusal("{{ raise_exception('roles must alternate') }}", user("hi"))
    assert len(refusal("{{ raise_exception('x' * 5000) }}", user("hi"))) < 400
    assert refusal("{{ raise_exception('no ' + messages[0].content) }}", user("<|im_end|>!")).endswith("no <|im_end|>!")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ 'a' + messages[0].content }}", {"role": "user"}),
        ("{{ 'a' + messages[0].content }}", {"role": "user", "content": 3}),
        ("{{ messages[0].content.split(7) }}", {"role": "user", "content": "x"}),
        ("{{ 1 / messages[0].content }}", {"role": "user", "content": 0}),
        (CONTENT, "not a message"),
    ],
)
def test_messages_a_template_cannot_render_are_the_clients_mistake(source, message):
    """Missing or odd fields end in a 400, whatever Python error the template runs into."""
    assert "chat template refuses" in refusal(source, [message])


def test_messages_nested_too_deeply_are_refused():
    """Nesting that exhausts the stack is a 400."""
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    assert refusal(CONTENT, [{"role": "user", "content": "x", "extra": deep}])


def test_half_a_surrogate_pair_is_refused():
    """A lone surrogate is no text: a 400, beside control tokens too."""
    for content in ("\ud83d", "<|im_end|>\ud83d"):
        with pytest.raises(InvalidRequestError, match="surrogate"):
            CHATML.encode(user(content))


def test_a_template_that_does_not_compile_is_refused_at_start():
    """A syntax error in the model's template names itself when the server starts, not with each request."""
    with pytest.raises(UnsupportedModelError, match="does not compile"):
        template("{% for %}")


@pytest.mark.parametrize("name", ["chat_template", "messages", "tools", "add_generation_prompt", "tokenize", "bos_token"])
def test_variables_cannot_replace_what_is_ours(name):
    """A request brings no template and does not overwrite messages or token names through chat_template_kwargs."""
    with pytest.raises(InvalidRequestError) as caught:
        CHATML.encode(user("hi"), kwargs={name: "{{ 1 }}"})
    assert caught.value.param == "chat_template_kwargs"


# ------------------------------------------------------------------------------------------------ messages


def test_text_parts_become_a_string_for_templates_that_want_one():
    """Parts are joined by line breaks where the template does not loop over content."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert TOKENIZER.decode(template(CONTENT).encode(user(parts))) == "a\nb"


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, {"text": "a"}, "a", 7])
def test_parts_that_are_not_text_are_refused(part):
    """Images and malformed parts are named in a 400."""
    assert "messages[0].content[0]" in refusal(CONTENT, user([part]))


def test_tool_call_arguments_must_be_json():
    """Arguments reach the template as an object; text that is no JSON is the client's mistake."""
    source = "{{ messages[0].tool_calls[0].function.arguments.city }}"
    call = {"function": {"name": "f", "arguments": '{"city": "Bern"}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert TOKENIZER.decode(template(source).encode(messages)) == "Bern"
    assert call["function"]["arguments"] == '{"city": "Bern"}'  # the caller's messages are left alone
    call["function"]["arguments"] = "{city"
    assert "messages[0].tool_calls[0]" in refusal(source, messages)


def test_a_final_message_is_continued_or_refused():
    """The prompt ends with its text; without text, or beside a generation prompt, or where the template hides it, it is a 400."""
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Dear <|im_end|>"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    ids = CHATML.encode(chat, **options)
    assert TOKENIZER.decode(ids, skip_special=False).endswith("<|im_start|>assistant\nDear <|im_end|>")
    assert not TOKENIZER.is_special(ids[-1])
    assert "no text to continue" in refusal(CONTENT, [{"role": "assistant"}], **options)
    assert "leaves the final message out" in refusal("{{ messages[0].content }}", chat, **options)
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        CHATML.encode(chat, continue_final_message=True)


def test_continuing_parts_ends_with_the_last_one():
    """A template that loops over content ends with the last part's text."""
    source = "{% for message in messages %}{% for part in message['content'] %}[{{ part.text }}]{% endfor %}{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]
    ids = template(source).encode(user(parts), add_generation_prompt=False, continue_final_message=True)
    assert TOKENIZER.decode(ids) == "[a][b "
