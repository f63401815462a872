"""Response bodies and events of the null server for each endpoint."""

import json
from typing import Any

PATHS = {
    "/v1/chat/completions": "chat", "/v1/completions": "completions", "/v1/responses": "responses",
    "/v1/embeddings": "embeddings",
}  # fmt: skip
WORD = " mill"  # every token of an answer
MAX_TOKENS = 1 << 17


def words_in(content: Any) -> int:
    """Count the prompt tokens: the words of a request, wherever they are."""
    match content:
        case str():
            return len(content.split())
        case list():
            return sum(map(words_in, content))
        case dict():
            return words_in(content.get("content")) or words_in(content.get("text"))
        case int():
            return 1
    return 0


def n_requested(body: dict[str, Any]) -> int:
    """Return the output tokens: exactly as many as requested, 16 by default."""
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        if isinstance(n := body.get(name), int):
            return max(1, min(n, MAX_TOKENS))
    return 16


def prompt_of(body: dict[str, Any]) -> int:
    names = ("messages", "prompt", "input", "text_input")
    return words_in(next((body[name] for name in names if body.get(name)), None))


def usage(kind: str, n_prompt: int, n_output: int) -> dict[str, int]:
    names = ("input_tokens", "output_tokens") if kind == "responses" else ("prompt_tokens", "completion_tokens")
    return dict(zip(names, (n_prompt, n_output), strict=True)) | {"total_tokens": n_prompt + n_output}


def event(data: dict[str, Any]) -> bytes:
    """Encode a server-sent event as one chunk of HTTP/1.1."""
    line = b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(line), line)


DONE = b"e\r\ndata: [DONE]\n\n\r\n"
END = b"0\r\n\r\n"


def text_event(kind: str, n_tokens: int, usage_json: dict[str, int] | None) -> bytes:
    """Encode an event of n tokens. usage_json: cumulative usage, if each event carries it"""
    text = WORD * n_tokens
    match kind:
        case "chat":
            choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "finish_reason": None}
            more = {"id": "null", "object": "chat.completion.chunk", "created": 0, "model": "null", "choices": [choice]}
        case "completions":
            choice = {"index": 0, "text": text, "finish_reason": None}
            more = {"id": "null", "object": "text_completion", "created": 0, "model": "null", "choices": [choice]}
        case "generate":
            return event({"model_name": "null", "model_version": "1", "text_output": text})
        case _:
            more = {"type": "response.output_text.delta", "item_id": "null", "output_index": 0, "delta": text}
    return event({**more, "usage": usage_json} if usage_json else more)


def last_events(kind: str, n_prompt: int, n_output: int) -> bytes:
    usage_json = usage(kind, n_prompt, n_output)
    match kind:
        case "chat":
            finish = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
        case "completions":
            finish = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
        case "generate":
            return END
        case _:
            return event({"type": "response.completed", "response": {"status": "completed", "usage": usage_json}}) + END
    return event(finish) + event({"choices": [], "usage": usage_json}) + DONE + END


def full_body(kind: str, n_prompt: int, n_output: int) -> bytes:
    """Return a response without streaming, including its headers."""
    usage_json, text = usage(kind, n_prompt, n_output), WORD * n_output
    match kind:
        case "embeddings":
            data: dict[str, Any] = {"data": [{"index": 0, "embedding": [0.125] * 8}], "usage": usage_json}
        case "chat":
            data = {"choices": [{"message": {"content": text}, "finish_reason": "length"}], "usage": usage_json}
        case "completions":
            data = {"choices": [{"text": text, "finish_reason": "length"}], "usage": usage_json}
        case "generate":
            data = {"model_name": "null", "model_version": "1", "text_output": text}
        case _:
            content = [{"type": "output_text", "text": text}]
            data = {"output": [{"type": "message", "content": content}], "status": "completed", "usage": usage_json}
    return plain(200, data)


def plain(status: int, data: Any) -> bytes:
    body = json.dumps(data).encode()
    head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


def metrics(running: int, waiting: int, kv: float) -> bytes:
    """Format Prometheus metrics with vLLM's names."""
    values = {"num_requests_running": running, "num_requests_waiting": waiting, "kv_cache_usage_perc": kv}
    lines = "".join(f'vllm:{name}{{model_name="null"}} {value}\n' for name, value in values.items())
    head = "HTTP/1.1 200 OK\r\ncontent-type: text/plain; version=0.0.4\r\n"
    return f"{head}content-length: {len(lines)}\r\n\r\n{lines}".encode()


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
