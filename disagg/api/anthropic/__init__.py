"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API.

The body (``types``) becomes a chat's (``convert``), which is judged and rendered where chats are; the answer's blocks are written
whole or as events (``blocks``) by the endpoint (``endpoint``). Failures have Anthropic's envelope in ``disagg.api.errors``.
"""
