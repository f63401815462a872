"""What happened to a request, step by step; and a page of the last steps: who was in prefill, decode or waiting."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import Struct
from starlette.responses import HTMLResponse, Response
from starlette.types import Scope

from millrace.report.page import render
from millrace.report.scale import Scale
from millrace.runtime.history import RequestTrace, StepSeen
from millrace.serve.backend import Models
from millrace.serve.errors import HttpError
from millrace.serve.replies import json_reply
from millrace.serve.text import TextBackend
from millrace.serve.wire import CALL, Call

SHOWN_STEPS, SHOWN_ROWS = 240, 48  # of a timeline: what a screen can hold
WIDTH, LEFT, TOP, ROW = 1080, 190, 26, 16
PAUSE_S = 0.005  # at most, of the time that is shown


class StepReply(Struct):
    """Times in milliseconds, the first since the request was queued. tokens: of this request in the step"""

    step: int
    at_ms: float
    took_ms: float
    prompt_tokens: int  # computed in it; output that is computed again after a preemption is none
    drawn_tokens: int
    all_tokens: int  # with those of others in the same step
    others: int  # sequences beside this request's
    waiting: int  # that nobody computed anything for


class TraceReply(Struct):
    """One request. `null`: it has not come so far. steps: its last 512, of the last few thousand of all"""

    id: str
    queued_ms: float | None  # until its first step
    first_token_ms: float | None  # from being queued
    total_ms: float | None
    prompt_tokens: int
    cached_tokens: int  # of them: their pages were known, so that nothing was computed
    prefill_saved_ms: float | None  # by that, at the pace of prompts in this server, of late; None where there was none
    generated_tokens: int
    preemptions: int
    steps: list[StepReply]


class TraceList(Struct):
    data: list[TraceReply]  # a call with several prompts has several; the last 8 of that id
    object: str = "request.trace"


def request_trace(models: Models, scope: Scope) -> Response:
    """By the id of the call: x-request-id. raises HttpError with 404"""
    request_id: str = scope["path_params"]["request_id"]
    call: Call = scope[CALL]
    loops = [backend.model.engine.loop for backend in models.of_kind(TextBackend)]
    found: list[TraceReply] = []
    for loop in loops:
        if own := [trace for trace in loop.traces(request_id) if trace.seen.tenant == call.tenant]:
            token_s = _prompt_token_s(tuple(loop.history.steps))
            found += [_trace(trace, token_s) for trace in own]
    if not found:
        raise HttpError(
            404, "request_not_found", f'nothing is known of the request "{request_id[:100]}"',
            "one of the last few hundred", "send the x-request-id that came with the answer",
        )  # fmt: skip
    return json_reply(TraceList(found))


def _trace(trace: RequestTrace, token_s: float | None) -> TraceReply:
    seen, timings = trace.seen, trace.seen.timings
    queued_s = timings.queued_s
    steps = [
        StepReply(
            step.number, _ms(step.began_s - queued_s), _ms(step.took_s),
            int(parts["n_prompt"].sum()), int(parts["draws"].sum()), step.n_tokens,
            len(step.parts) - len(parts), step.waiting,
        )
        for step, parts in trace.steps
    ]  # fmt: skip
    saved = None if token_s is None else _ms(seen.n_cached * token_s)
    return TraceReply(
        seen.id, _since(queued_s, timings.first_scheduled_s), _since(queued_s, timings.first_token_s),
        _since(queued_s, timings.finished_s), seen.n_prompt, seen.n_cached, saved, timings.n_output_tokens,
        timings.n_preemptions, steps,
    )  # fmt: skip


def _prompt_token_s(steps: Sequence[StepSeen]) -> float | None:
    """What a token of a prompt took of late: steps are shared by their tokens, so long prompts decide."""
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


def timeline(models: Models, scope: Scope) -> Response:
    """A page that needs no network and runs no script: save it, and it stays what it is."""
    pages = [
        {"name": backend.model.name, **_drawn(tuple(backend.model.engine.loop.history.steps)[-SHOWN_STEPS:])}
        for backend in models.of_kind(TextBackend)
    ]
    template = Path(__file__).with_name("timeline.html")
    return HTMLResponse(
        render(template, models=pages, steps=SHOWN_STEPS, width=WIDTH, left=LEFT, row=ROW, most=SHOWN_ROWS)
    )


def _drawn(steps: Iterable[StepSeen]) -> dict[str, object]:
    """A row for each sequence, a block for each of its steps: prompt tokens, a token drawn, or output once more."""
    steps = list(steps)
    if not steps:
        return {"rows": [], "height": TOP, "ticks": [], "n_steps": 0, "n_left_out": 0, "waiting": []}
    begins, end_s = _without_pauses(steps)
    x = Scale(0.0, end_s, LEFT, WIDTH - 24)
    blocks: dict[tuple[str, int], list[dict[str, object]]] = {}
    for step, begin_s in zip(steps, begins, strict=True):
        at, width = x.at(begin_s), max(0.8, x.at(begin_s + step.took_s) - x.at(begin_s))
        for request_id, part in zip(step.request_ids, step.parts, strict=True):
            again = "a token" if part["draws"] and part["n"] == 1 else f"{part['n']} tokens again"
            what = f"{part['n_prompt']} prompt tokens" if part["n_prompt"] else again
            title = f"step {step.number}: {what}, {step.took_s * 1e3:.1f} ms, {len(step.parts)} sequences"
            kind = 1 if part["n_prompt"] else 0
            block: dict[str, object] = {"x": at, "width": round(width, 2), "kind": kind, "title": title}
            blocks.setdefault((request_id, int(part["choice"])), []).append(block)
    shown = list(blocks.items())[-SHOWN_ROWS:]
    rows = [
        {"label": f"{request_id[:20]} {choice}", "y": TOP + ROW * i, "blocks": of_row}
        for i, ((request_id, choice), of_row) in enumerate(shown)
    ]
    y = TOP + ROW * len(rows)
    waiting = [{"x": x.at(s), "n": step.waiting} for step, s in zip(steps, begins, strict=True) if step.waiting]
    ticks = [{"x": x.at(end_s * i / 6), "ms": round(end_s * i / 6 * 1e3)} for i in range(7)]
    return {
        "rows": rows, "height": y + 24, "ticks": ticks, "n_steps": len(steps), "waiting": waiting, "waiting_y": y + 4,
        "n_left_out": len(blocks) - len(rows),
    }  # fmt: skip


def _without_pauses(steps: Sequence[StepSeen]) -> tuple[list[float], float]:
    """When each begins, and the last one ends, where pauses in which nobody asked for anything are short."""
    begins, now_s = [], 0.0
    for i, step in enumerate(steps):
        before = steps[i - 1] if i else step
        now_s += min(max(0.0, step.began_s - before.began_s - before.took_s), PAUSE_S) if i else 0.0
        begins.append(now_s)
        now_s += step.took_s
    return begins, now_s
