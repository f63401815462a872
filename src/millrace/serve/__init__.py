"""The protocols that clients already speak, one folder each; OpenAI's shapes are what all of them turn into.

A request's way: `connections.py` (bytes, time-outs) -> `wire.py` (head and body) -> `routes.py` (id, key, endpoint,
errors) -> `fields.py` (JSON to the structs of `protocol.py`) -> `backend.py` (the model) -> an endpoint in `openai/`,
`responses/`, `anthropic/` or `ollama/` -> `generation.py` (the engine) -> the folder's own structs, which go
back; what several protocols say, such as usage and log probabilities, is in `replies.py`.
`server.py` has the socket and the signals, `app.py` puts the tables of the protocols together.
"""
