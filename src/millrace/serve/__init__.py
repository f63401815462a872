"""The protocols that clients already speak: OpenAI's API, NIM's management endpoints, Prometheus metrics.

A request's way: `server.py` (socket, signals) -> `edge.py` (request id, errors, log line) -> `app.py` (the table of
routes) -> `wire.py` (body, disconnects) -> `fields.py` (JSON to the structs of `protocol.py`) -> `chat.py` or
`completions.py` -> `generation.py` (the engine) -> `replies.py` (the structs that go back).
"""
