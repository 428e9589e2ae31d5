"""Where tokenizers come from: the null model, GGUF metadata, HF folders; what is refused, and why."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from disagg.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from disagg.model import ModelFiles
from disagg.text.chat_template import load_chat_template
from disagg.text.gguf_tokenizer import GgufVocabulary
from disagg.text.tokenizer import Tokenizer, load_tokenizer

NULL = load_tokenizer(ModelFiles(kind="null", path=Path(), name="null"))


class Field:
    def __init__(self, value):
        self._value = value

    def contents(self):
        return self._value


class Metadata:
    """A GGUF reader as far as tokenizers use it, over a dict."""

    def __init__(self, **values):
        self._values = {f"tokenizer.ggml.{key}": value for key, value in values.items()}

    def get_field(self, key):
        return Field(self._values[key]) if key in self._values else None


# ------------------------------------------------------------------------------------------------ null


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_null_ids_are_bytes(text):
    """The null model's ids are the text's UTF-8 bytes, and its specials follow them."""
    assert NULL.encode(text, allow_special=False) == list(text.encode())
    assert NULL.decode(list(text.encode())) == text


def test_null_facts():
    """Three control tokens after the bytes; <|im_end|> ends an answer; unknown ids stand for nothing."""
    assert NULL.vocab_size == 259
    assert NULL.encode("a<|endoftext|><|im_start|><|im_end|>") == [97, 256, 257, 258]
    assert NULL.eos_token_ids == (258,)
    assert [NULL.is_special(token_id) for token_id in (0, 255, 256, 258, 259)] == [False, False, True, True, False]
    assert [NULL.token_bytes(token_id) for token_id in (-1, 0xE4, 258, 259)] == [b"", b"\xe4", b"<|im_end|>", b""]
    assert NULL.token_text(0xE4) == "\ufffd"
    assert NULL.decode([97, -1, 10**9, 98]) == "ab"


# ------------------------------------------------------------------------------------------------ GGUF


def test_unknown_gguf_tokenizers_are_refused_by_name():
    """An algorithm or a split that is not known exactly is refused with the names of those that are."""
    with pytest.raises(UnsupportedModelError, match=r"'bert'.*'gpt2' and 'llama'"):
        GgufVocabulary(Metadata(model="bert")).backend()
    for pre in ({"pre": "viking"}, {}):
        with pytest.raises(UnsupportedModelError, match=r"pre-tokenizer.*smollm"):
            GgufVocabulary(Metadata(model="gpt2", tokens=["a"], **pre)).backend()


def test_incomplete_gguf_metadata_is_refused():
    """A file without tokens, or a SentencePiece vocabulary without scores, is a ConfigError that says what is missing."""
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.tokens"):
        GgufVocabulary(Metadata(model="llama")).backend()
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.scores"):
        GgufVocabulary(Metadata(model="llama", tokens=["a"])).backend()


@pytest.mark.parametrize(
    ("metadata", "bos"),
    [
        ({"model": "llama"}, (1,)),
        ({"model": "llama", "add_bos_token": False}, ()),
        ({"model": "gpt2", "pre": "llama-bpe"}, (1,)),
        ({"model": "gpt2", "pre": "qwen2"}, ()),
        ({"model": "gpt2", "pre": "qwen2", "add_bos_token": True}, (1,)),
    ],
)
def test_gguf_bos_is_the_flag_or_the_familys_habit(metadata, bos):
    """BOS goes in front where the file says so, or, where it says nothing, where the family always does."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>"]
    vocabulary = GgufVocabulary(Metadata(tokens=tokens, scores=[0.0] * len(tokens), bos_token_id=1, **metadata))
    assert vocabulary.bos_token_ids(vocabulary.backend()) == bos


def test_gguf_ends_of_sequence_and_names():
    """All of eos, eot and eom end an answer, each once; templates get the texts of the named tokens."""
    ids = {"bos_token_id": 0, "eos_token_id": 1, "eot_token_id": 2, "eom_token_id": 1}
    vocabulary = GgufVocabulary(Metadata(model="gpt2", pre="gpt-2", tokens=["<b>", "<e>", "<t>"], **ids))
    assert vocabulary.eos_token_ids(vocabulary.backend()) == (1, 2)
    assert vocabulary.special_names() == {"bos_token": "<b>", "eos_token": "<e>"}
    assert vocabulary.chat_template() is None


def test_sentencepiece_text_cannot_spell_control_tokens():
    """Pieces that would join to a control token do not, because only normal pieces are results of merges."""
    tokens = ["<unk>", "</s>", "</", "s>", "▁", "<", "/", "s", ">", "▁x", "x"]
    types, scores = [2, 3] + [1] * 9, [0.0, 0.0, -1.0, -2.0, *[-10.0] * 5, -3.0, -10.0]
    metadata = Metadata(model="llama", tokens=tokens, token_type=types, scores=scores, eos_token_id=1)
    tokenizer = Tokenizer(GgufVocabulary(metadata).backend())
    assert tokenizer.encode("x</s>", add_bos=False) == [9, 1]
    assert tokenizer.encode("x</s>", add_bos=False, allow_special=False) == [9, 2, 3]


# ------------------------------------------------------------------------------------------------ HF folders


def folder(path: Path, backend: Backend | None = None, **files) -> ModelFiles:
    """A model folder with ``files`` as JSON: an underscore in a name stands for itself, and ".json" is added."""
    (backend or byte_backend()).save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return ModelFiles(kind="hf", path=path, name="test")


def byte_backend() -> Backend:
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|end|>"])  # 256, 257, 258
    return backend


@pytest.mark.parametrize(
    ("flag", "single", "before"),
    [
        ({}, "$A", []),
        ({}, "<s> $A", [256]),
        ({}, "<s> $A </s>", [256]),
        ({}, "$A </s>", []),
        ({"add_bos_token": False}, "<s> $A", []),
        ({"add_bos_token": True}, "$A", [256]),
    ],
)
def test_folder_bos_is_the_flag_or_the_post_processors(tmp_path, flag, single, before):
    """BOS is the flag's decision, else the post-processor's; an EOS that it appends would end the prompt and is left out."""
    backend = byte_backend()
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=f"{single} $B", special_tokens=[("<s>", 256), ("</s>", 257)]
    )
    tokenizer = load_tokenizer(folder(tmp_path, backend, tokenizer_config={"bos_token": "<s>", **flag}))
    bare = tokenizer.encode("ab", add_bos=False)
    assert len(bare) == 2
    assert tokenizer.encode("ab") == before + bare
    assert tokenizer.encode("") == before


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"generation_config": {"eos_token_id": [258, 257]}, "config": {"eos_token_id": 256}}, (258, 257)),
        ({"config": {"eos_token_id": 257}}, (257,)),
        ({"config": {"eos_token_id": 257}, "tokenizer_config": {"eos_token": "<|end|>"}}, (257, 258)),
        ({"tokenizer_config": {"eos_token": {"content": "</s>"}}}, (257,)),
        ({"special_tokens_map": {"eos_token": "</s>"}, "tokenizer_config": {"eos_token": "<|end|>"}}, (258,)),
        ({"special_tokens_map": {"eos_token": "</s>"}}, (257,)),
        ({}, ()),
    ],
)
def test_folder_ends_of_sequence(tmp_path, files, ends):
    """generation_config.json, else config.json, and the tokenizer's own: an id or a list, each once."""
    assert load_tokenizer(folder(tmp_path, **files)).eos_token_ids == ends


def test_folder_template_places(tmp_path):
    """tokenizer_config.json (one, or a list with a default), chat_template.json before it, chat_template.jinja before all."""

    def rendered(**files) -> str | None:
        model = folder(tmp_path, **files)
        tokenizer = load_tokenizer(model)
        template = load_chat_template(model, tokenizer)
        return template and tokenizer.decode(template.encode([]), skip_special=False)

    assert rendered() is None
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named{{ eos_token }}"}]
    assert rendered(tokenizer_config={"chat_template": "plain{{ bos_token }}", "bos_token": "<s>"}) == "plain<s>"
    assert rendered(tokenizer_config={"chat_template": named, "eos_token": "</s>"}) == "named</s>"
    assert rendered(chat_template={"chat_template": "processor"}) == "processor"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert rendered() == "file"


def test_broken_folders_are_refused_by_file(tmp_path):
    """No tokenizer.json, one that is no tokenizer, JSON that is none: ConfigError names the file."""
    model = ModelFiles(kind="hf", path=tmp_path, name="test")
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        load_tokenizer(model)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(model)
    for content in ("{", "[]"):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
            load_tokenizer(model)


def test_other_decoders_are_refused():
    """A vocabulary whose spelling of bytes is not known gives no tokenizer at all, rather than wrong text."""
    backend = byte_backend()
    for decoder in (decoders.WordPiece(), decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()])):
        backend.decoder = decoder
        with pytest.raises(UnsupportedModelError, match="decoder"):
            Tokenizer(backend)


def test_gaps_between_ids_confuse_nothing():
    """Where a vocabulary's ids have gaps, ordinary tokens and control tokens keep their ids, trusted and not."""
    backend = Backend(models.BPE(vocab={"a": 0, "<s>": 1, "b": 3, "<": 4, "s": 5, ">": 7, "c": 8}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>")])
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("abc<s>") == [0, 3, 8, 1]
    assert tokenizer.encode("abc<s>", allow_special=False) == [0, 3, 8, 4, 5, 7]
    assert tokenizer.encode_trusted("<s>abc" + tokenizer.distrust("<s>")) == [1, 0, 3, 8, 4, 5, 7]
    assert tokenizer.vocab_size == 9


def test_a_control_token_that_letters_spell_is_refused_as_text():
    """Where merges lead to a control token, text that spells it is refused instead of becoming one."""
    backend = Backend(models.BPE(vocab={"<": 0, "s": 1, "<s": 2}, merges=[("<", "s")]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s")])
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("s<s") == [1, 2]
    with pytest.raises(InvalidRequestError, match="'<s'"):
        tokenizer.encode("s<s", allow_special=False)
