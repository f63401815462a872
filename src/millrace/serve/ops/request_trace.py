"""Traces of requests: their stages and steps with times."""

import re
from collections.abc import Sequence
from urllib.parse import parse_qsl

from msgspec import Struct, field
from starlette.responses import Response
from starlette.types import Scope

from millrace.errors import RequestError
from millrace.runtime.step_history import MAX_STEPS, RequestTrace, StepRecord
from millrace.serve.backend import Models
from millrace.serve.http.errors import HttpError
from millrace.serve.http.http_request import CALL, RequestContext
from millrace.serve.llm.language_model import TextBackend
from millrace.serve.llm.response_types import json_reply


class StepReply(Struct):
    """Times in milliseconds, the first since the request was queued. tokens: of this request in the step"""

    step: int
    at_ms: float
    took_ms: float
    prompt_tokens: int  # computed in this step; without output that is recomputed after a preemption
    drawn_tokens: int
    all_tokens: int  # of all requests in this step
    n_others: int = field(name="others")  # sequences of other requests
    waiting: int  # sequences that were not in the step


class TraceReply(Struct):
    """The trace of one request. `null`: not reached yet; steps: its last 512, among the last few thousand of all

    Each stage lies between two of these times: received, prepared, queued, computed, sent.
    """

    id: str
    preparing_ms: float | None  # from its first byte until it is queued: reading, rendering, tokenisation
    queued_ms: float | None  # until its first step; this and all times below count from the moment it was queued
    first_token_ms: float | None  # until the step that sampled it ended
    first_sent_ms: float | None  # until the first text was handed to the connection
    total_ms: float | None
    last_sent_ms: float | None  # the same for the last token
    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in the prefix cache
    prefill_saved_ms: float | None  # estimated for cached_tokens at the recent prefill rate; None if unknown
    generated_tokens: int
    preemptions: int
    steps: list[StepReply]


class TraceList(Struct):
    data: list[TraceReply]  # one per prompt of the call; the last 8 of that id
    object: str = "request.trace"


def request_trace(models: Models, scope: Scope) -> Response:
    """Return the trace of a call by its x-request-id; `?steps=N`: the last N steps.

    raises HttpError with 404, RequestError
    """
    n_steps = _step_limit(scope)
    request_id: str = scope["path_params"]["request_id"]
    call: RequestContext = scope[CALL]
    loops = [backend.model.engine.loop for backend in models.of_kind(TextBackend)]
    traces: list[TraceReply] = []
    for loop in loops:
        if own := [trace for trace in loop.traces(request_id) if trace.record.tenant == call.tenant]:
            token_s = _prompt_token_s(tuple(loop.history.steps))
            traces += [_trace(trace, token_s, n_steps) for trace in own]
    if not traces:
        raise HttpError(
            404, "request_not_found", f'nothing is known of the request "{request_id[:100]}"',
            "one of the last few hundred", "send the x-request-id that came with the answer",
        )  # fmt: skip
    return json_reply(TraceList(traces))


def _step_limit(scope: Scope) -> int:
    limit = MAX_STEPS
    for name, value in parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True):
        if name != "steps" or not re.fullmatch("[0-9]{1,9}", value):
            raise RequestError(f"{name:.60}={value:.60} is asked of a trace", "steps=N", "leave it out", name[:60])
        limit = int(value)
    return limit


def _trace(trace: RequestTrace, token_s: float | None, n_steps: int = MAX_STEPS) -> TraceReply:
    request, timings = trace.record, trace.record.timings
    queued_s = timings.queued_s
    steps = [
        StepReply(
            step.number, _ms(step.began_s - queued_s), _ms(step.took_s),
            int(parts["n_prompt"].sum()), int(parts["draws"].sum()), step.n_tokens,
            len(step.parts) - len(parts), step.waiting,
        )
        for step, parts in trace.steps[max(0, len(trace.steps) - n_steps) :]
    ]  # fmt: skip
    saved = None if token_s is None else _ms(request.n_cached * token_s)
    return TraceReply(
        request.id, None if timings.received_s is None else _ms(queued_s - timings.received_s),
        _since(queued_s, timings.first_scheduled_s), _since(queued_s, timings.first_token_s),
        _since(queued_s, timings.first_read_s), _since(queued_s, timings.finished_s),
        _since(queued_s, timings.last_read_s),
        request.n_prompt, request.n_cached, saved, timings.n_output_tokens,
        timings.n_preemptions, steps,
    )  # fmt: skip


def _prompt_token_s(steps: Sequence[StepRecord]) -> float | None:
    """Return the recent time per prompt token; a step counts by its prompt tokens, so long prompts dominate."""
    n_prompt = took_s = 0.0
    for step in steps:
        n_own = int(step.parts["n_prompt"].sum())
        n_prompt += n_own
        took_s += step.took_s * n_own / max(1, step.n_tokens)
    return took_s / n_prompt if n_prompt else None


def _since(start_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else _ms(end_s - start_s)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
