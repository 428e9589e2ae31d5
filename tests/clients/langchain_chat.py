"""LangChain's ChatOpenAI: whole, streamed, several at once. Prints what it got as JSON. Arguments: base URL, model."""

import json
import sys

from langchain_openai import ChatOpenAI

base_url, model = sys.argv[1:]
QUESTION = "Can you tell me the capital of France?"
chat = ChatOpenAI(
    base_url=base_url, api_key="none", model=model, temperature=0, max_completion_tokens=16, max_retries=0, stream_usage=True
)
whole = chat.invoke([("human", QUESTION)])
chunks = list(chat.stream([("human", QUESTION)]))
batch = chat.batch([QUESTION, "Say hello."])
print(
    json.dumps(
        {
            "whole": whole.content,
            "finish_reason": whole.response_metadata["finish_reason"],
            "usage": whole.usage_metadata,
            "streamed": "".join(chunk.content for chunk in chunks),
            "num_chunks": len(chunks),
            "stream_usage": next(chunk.usage_metadata for chunk in reversed(chunks) if chunk.usage_metadata),
            "batch": [answer.content for answer in batch],
        }
    )
)
