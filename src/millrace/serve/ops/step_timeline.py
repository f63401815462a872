"""The last steps as a page with prefill, decode and waiting sequences, and as data.

If there are several API keys, each sees its own requests; a key with `role=admin` sees all.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import parse_qsl

import numpy as np
from msgspec import Struct
from starlette.responses import HTMLResponse, Response
from starlette.types import Scope

from millrace.errors import RequestError
from millrace.machine.cpu import machine_name
from millrace.report.page import render
from millrace.report.plot_scale import Scale
from millrace.runtime.loop import EngineLoop
from millrace.runtime.scheduling.step_features import StepWork, step_intervals_s
from millrace.runtime.step_history import StepRecord
from millrace.serve.backend import Models
from millrace.serve.http.http_request import CALL, RequestContext
from millrace.serve.llm.language_model import TextBackend
from millrace.serve.llm.response_types import json_reply

SHOWN_STEPS, SHOWN_ROWS = 240, 48  # what a screen can hold
WIDTH, LEFT, TOP, ROW = 1080, 190, 26, 16
PAUSE_S = 0.005  # at most, of the time that is shown


class StepEntry(Struct):
    """Times in seconds, the first of the server's clock. prompts: [tokens before it, tokens] of each chunk of a prompt

    rows: running answers; contexts: tokens of all of them together, those of this step included
    """

    step: int
    at_s: float
    took_s: float
    turn_s: float | None  # until the next one began; null if the engine may have been idle in between
    waiting: int
    prompts: list[tuple[int, int]]
    rows: int
    contexts: int


class ScheduleReply(Struct):
    """Bounds of a step: the engine's limits, and how long prompts may delay running answers."""

    max_step_tokens: int
    max_sequences: int
    max_rows: int
    max_context: int
    page_tokens: int
    pages: int
    gap_limit_s: float
    stretch: float
    chunk_low: int


class StepsReply(Struct):
    """engine: its identity; isa: that it runs with; machine: processor and cores"""

    model: str
    engine: str
    isa: str
    machine: str
    schedule: ScheduleReply
    steps: list[StepEntry]


class StepList(Struct):
    """The last 4,096 steps of each language model, or those of them after `?after=N`."""

    data: list[StepsReply]
    object: str = "list"


def steps(models: Models, scope: Scope) -> Response:
    """Return the last steps; if there are several API keys, only of the client's own requests. raises RequestError"""
    after, replies = _after_step(scope), []
    for backend in models.of_kind(TextBackend):
        loop, about = backend.model.engine.loop, backend.model.metadata
        visible = _visible_steps(loop, scope[CALL])
        intervals, limits, budget = step_intervals_s(visible), loop.limits, loop.budget
        schedule = ScheduleReply(
            limits.max_step_tokens, limits.max_sequences, limits.max_rows, limits.max_context, limits.page_tokens,
            limits.n_pages, budget.gap_limit_s, budget.stretch, budget.chunk_low,
        )  # fmt: skip
        entries = [
            _step_entry(step, turn_s) for step, turn_s in zip(visible, intervals, strict=True) if step.number > after
        ]
        engine, isa = (str(about.get(name, "")) for name in ("engine", "isa"))
        replies.append(StepsReply(backend.model.name, engine, isa, machine_name(), schedule, entries))
    return json_reply(StepList(replies))


def _visible_steps(loop: EngineLoop, call: RequestContext) -> tuple[StepRecord, ...]:
    """Return the last steps that a client may see: with several API keys, only the work for its own requests."""
    steps = tuple(loop.history.steps)
    if not call.tenant or call.is_admin:
        return steps
    own, visible = loop.history.requests_of(call.tenant), []
    for step in steps:
        mine = np.isin(step.parts["request"], own)
        if mine.any():
            ids = tuple(request_id for request_id, is_mine in zip(step.request_ids, mine, strict=True) if is_mine)
            visible.append(step._replace(parts=step.parts[mine], request_ids=ids, waiting=0))
    return tuple(visible)


def _step_entry(step: StepRecord, turn_s: float | None) -> StepEntry:
    work = StepWork.from_parts(step.parts)
    prompts = list(zip(work.starts, work.prompts, strict=True))
    return StepEntry(
        step.number, step.began_s, step.took_s, turn_s, step.waiting, prompts, work.rows, work.contexts
    )  # fmt: skip


def _after_step(scope: Scope) -> int:
    after = 0
    for name, value in parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True):
        if name != "after" or not re.fullmatch("[0-9]{1,15}", value):
            raise RequestError(f"{name:.60}={value:.60} is asked of the steps", "after=N", "leave it out", name[:60])
        after = int(value)
    return after


def timeline(models: Models, scope: Scope) -> Response:
    """Return a page that needs no network and no script, so that it can be saved."""
    pages = [
        {"name": backend.model.name, **_chart(_visible_steps(backend.model.engine.loop, scope[CALL])[-SHOWN_STEPS:])}
        for backend in models.of_kind(TextBackend)
    ]
    template = Path(__file__).with_name("timeline.html")
    return HTMLResponse(
        render(template, models=pages, steps=SHOWN_STEPS, width=WIDTH, left=LEFT, row=ROW, most=SHOWN_ROWS)
    )


def _chart(steps: Iterable[StepRecord]) -> dict[str, object]:
    """Return the chart: a row per sequence, a block per step (prompt tokens, a sampled token, or recomputed output)."""
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
            message = f"{part['n_prompt']} prompt tokens" if part["n_prompt"] else again
            title = f"step {step.number}: {message}, {step.took_s * 1e3:.1f} ms, {len(step.parts)} sequences"
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


def _without_pauses(steps: Sequence[StepRecord]) -> tuple[list[float], float]:
    """Return when each step begins and the last one ends, with idle pauses shortened."""
    begins, now_s = [], 0.0
    for i, step in enumerate(steps):
        before = steps[i - 1] if i else step
        now_s += min(max(0.0, step.began_s - before.began_s - before.took_s), PAUSE_S) if i else 0.0
        begins.append(now_s)
        now_s += step.took_s
    return begins, now_s
