"""OpenTelemetry spans of requests to language models and encoders, by the conventions for generative models.

Source: semantic conventions of OpenTelemetry, "gen-ai"; times by the names that vLLM gives them.
"""

from typing import Any

from starlette.types import Scope

from millrace.model_repository.tracing.trace_context import PARENT, STATE
from millrace.model_repository.tracing.tracer import Tracer
from millrace.serve.http.errors import CLIENT_CLOSED
from millrace.serve.http.http_request import RequestContext, combine_duplicate_headers

# Operation names by path; other paths are named by their last part.
_OPERATIONS = {"chat/completions": "chat", "responses": "chat", "messages": "chat", "api/chat": "chat",
               "completions": "text_completion", "generate": "text_completion", "embeddings": "embeddings",
               "embed": "embeddings"}  # fmt: skip


def trace(tracer: Tracer, call: RequestContext, scope: Scope) -> None:
    """Export the span of a finished request to a model, if the tracer's settings sample it. tracer: is on"""
    if not call.model:
        return
    headers = combine_duplicate_headers(scope["headers"], b",")
    parent = tracer.parent(headers.get(PARENT.encode()), headers.get(STATE.encode()))
    if tracer.spans is None or not tracer.samples_other(parent):
        return
    log = call.log
    path = log.path.partition("?")[0].rstrip("/")
    operation = next((what for end, what in _OPERATIONS.items() if path.endswith(f"/{end}")), path.rpartition("/")[2])
    status = log.status or CLIENT_CLOSED
    failed = log.error or ("the client has gone" if status == CLIENT_CLOSED else "")
    name, began_ns = f"{operation} {call.model}", int(call.arrived_s * 1e9)
    tracer.spans.record_span(name, began_ns, parent, _attributes(call, operation, status), failed, str(status))


def _attributes(call: RequestContext, operation: str, status: int) -> dict[str, Any]:
    log = call.log
    attributes = {
        "gen_ai.operation.name": operation, "gen_ai.provider.name": "millrace", "gen_ai.request.model": call.model,
        "gen_ai.request.id": call.id, "gen_ai.usage.input_tokens": log.prompt_tokens,
        "gen_ai.usage.output_tokens": log.generated_tokens,
        "gen_ai.response.finish_reasons": log.finish_reason.split("+") if log.finish_reason else None,
        "gen_ai.latency.time_in_queue": _seconds(log.queue_ms),
        "gen_ai.latency.time_to_first_token": _seconds(log.ttft_ms),
        "http.request.method": log.method, "url.path": log.path, "http.response.status_code": status,
    }  # fmt: skip
    return {key: value for key, value in attributes.items() if value is not None}


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3
