"""LiteLLM as a library: whole, streamed, raw text, an error. Prints what it got as JSON. Arguments: base URL, model."""

import json
import sys

import litellm

litellm.suppress_debug_info = True  # it would go to standard output
base_url, model = sys.argv[1:]
to = {"base_url": base_url, "api_key": "none", "num_retries": 0, "temperature": 0, "max_tokens": 16}
messages = [{"role": "user", "content": "Can you tell me the capital of France?"}]
whole = litellm.completion(model=f"openai/{model}", messages=messages, **to)
streaming = {"stream": True, "stream_options": {"include_usage": True}}
chunks = list(litellm.completion(model=f"openai/{model}", messages=messages, **streaming, **to))
text = litellm.text_completion(model=f"text-completion-openai/{model}", prompt="The capital of France is", **to)
try:
    litellm.completion(model=f"openai/{model}", messages=messages, **{**to, "temperature": 9})
    refusal = None
except litellm.BadRequestError as error:
    refusal = error.message
print(
    json.dumps(
        {
            "whole": whole.choices[0].message.content,
            "finish_reason": whole.choices[0].finish_reason,
            "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
            "usage": whole.usage.completion_tokens,
            "stream_usage": next(chunk.usage.completion_tokens for chunk in reversed(chunks) if getattr(chunk, "usage", None)),
            "text": text.choices[0].text,
            "refusal": refusal,
        }
    )
)
