"""The protocols that clients already speak: OpenAI's API, NIM's management endpoints, Prometheus metrics.

A request's way: `connections.py` (bytes, time-outs) -> `wire.py` (head and body) -> `routes.py` (id, key, endpoint,
errors) -> `fields.py` (JSON to the structs of `protocol.py`) -> `backend.py` (the model) -> `chat.py`, `completions.py`
or `embeddings.py` -> `generation.py` (the engine) -> `replies.py` (the structs that go back).
`server.py` has the socket and the signals, `app.py` puts the tables of the protocols (`openai.py`) together.
"""
