"""POST /v1/responses, OpenAI's Responses API, without a memory: a conversation's earlier items come with each request.

The body becomes a chat's (``convert``), which is judged and rendered where chats are; the answer's items grow piece by piece
(``items``), and the endpoint (``endpoint``) writes them whole or as events.
"""
