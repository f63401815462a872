"""A page of the last steps: who was in prefill, decode or waiting."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from starlette.responses import HTMLResponse, Response
from starlette.types import Scope

from millrace.report.page import render
from millrace.report.scale import Scale
from millrace.runtime.history import StepSeen
from millrace.serve.backend import Models
from millrace.serve.text import TextBackend

SHOWN_STEPS, SHOWN_ROWS = 240, 48  # what a screen can hold
WIDTH, LEFT, TOP, ROW = 1080, 190, 26, 16
PAUSE_S = 0.005  # at most, of the time that is shown


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
