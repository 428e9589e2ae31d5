"""The HTTP surface: OpenAI's endpoints and the operator's, and the only package that knows aiohttp.

The way of a request: ``app`` (body limit, request id, errors) → ``completions`` or ``chat`` (typed body, checks, token ids;
``read``, ``types``, ``validate``) → ``generate`` (submit, follow the streams) → ``choice`` (tokens to text, stop strings) →
``logprobs``, ``sse`` (bytes). The two endpoints differ in their shape functions only. ``tokenize`` answers with ids alone.
``openapi`` describes all of it, from the types of the bodies and ``answer_types``; ``docs`` shows that to people.
"""
