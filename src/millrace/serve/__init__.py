"""The HTTP server and the protocols that clients already speak.

    http/       connections, request bodies, routes, API keys, errors
    llm/        language models and encoders behind their endpoints
    protocols/  one folder per protocol: endpoints and the structs of requests and responses
    ops/        health, metrics, logs, traces, management

A chat request passes `http/connection.py` (bytes, time-outs), `http/http_request.py` (head, access log),
`http/routes.py` (id, API key, endpoint, errors), `llm/request_decoding.py` (JSON to the structs of
`llm/request_types.py`), `backend.py` (the model), `protocols/openai/chat.py` and `llm/generation_stream.py` (the
engine). The other protocols turn into OpenAI's request; what several of them answer is in `llm/response_types.py`.
`server.py` owns the sockets and signals, `app.py` joins the tables of the protocols.
"""
