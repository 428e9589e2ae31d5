"""The null model's vocabulary, made in code: ids 0-255 are the bytes, then the three ChatML control tokens."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from disagg.text.token_bytes import BYTE_ALPHABET

_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 256, 257, 258
_CHATML = (
    "{% if tools %}{{ '<|im_start|>tools\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class NullVocabulary:
    def backend(self) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer(models.BPE(vocab=BYTE_ALPHABET, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in _CONTROL])
        return backend

    def bos_token_ids(self, backend: tokenizers.Tokenizer) -> tuple[int, ...]:
        return ()

    def eos_token_ids(self, backend: tokenizers.Tokenizer) -> tuple[int, ...]:
        return (256 + _CONTROL.index("<|im_end|>"),)

    def special_names(self) -> dict[str, str]:
        return {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}

    def chat_template(self) -> str | None:
        return _CHATML
