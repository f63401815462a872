"""Output of `millrace build --traffic`: choices and savings in bytes of the engine that was built."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from millrace.cli.console import heading, pairs, size
from millrace.cli.engine_tables import Tables
from millrace.engine.cache_specs import PAGE_TOKENS, KvFormat, page_bytes
from millrace.machine.cpu import memory
from millrace.report.format_numbers import format_duration, format_percent
from millrace.runtime.memory_plan import RESERVE
from millrace.tune.day_night import DayPart
from millrace.tune.engine_settings import ChosenSettings, TrafficChoice
from millrace.tune.traffic import BUSY, Proposal

NAMES = {"max_context": "max context", "max_batch": "max batch", "tune_rows": "tuned rows", "tune": "tuning"}
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Figures:
    """Traffic choices with the sizes of the built engine. page: bytes of a KV page; int8: of a page in int8 format"""

    chosen: ChosenSettings
    page: int
    int8: int
    free: int

    @classmethod
    def from_choices(cls, choices: ChosenSettings, tables: Tables) -> "Figures":
        engine, cpu = tables.engine, tables.engine.manifest.cpu
        int8 = page_bytes(tuple(replace(cache, format=KvFormat.INT8) for cache in engine.caches))
        fixed = cpu.weights_bytes + cpu.activation_bytes + RESERVE
        return cls(choices, engine.page_bytes, int8, memory().available_bytes - fixed)

    def kv_pages(self, proposal: Proposal, context: int, batch: int) -> int:
        """Return KV pages including shared prefixes, at least one sequence and at most the batch at full context."""
        pages = -(-context // PAGE_TOKENS)
        return max(min(proposal.pages_kept, pages * batch), proposal.pages_running, pages)

    @property
    def pages(self) -> int:
        return self.kv_pages(self.chosen.proposal, self.chosen.value("max_context"), self.chosen.value("max_batch"))

    @property
    def kv_bytes(self) -> int:
        return self.pages * self.page

    @property
    def default_kv_bytes(self) -> int:
        context, batch = (int(self.chosen.default(name)) for name in ("max_context", "max_batch"))
        return -(-context // PAGE_TOKENS) * batch * self.page

    @property
    def flag(self) -> str:
        """Return the --kv-memory flag in whole MiB."""
        return f"--kv-memory {-(-self.kv_bytes // MIB)}M"

    def reason(self) -> str:
        p = self.chosen.proposal
        if p.batch is None:
            return f"{self.chosen.value('max_batch')} requests in a row held no more, {BUSY:g} % of the time"
        text = f"at {BUSY:g} % of the arrivals those that ran held no more than {size(p.pages_running * self.page)}"
        if p.pages_kept > p.pages_running:
            all_of = "" if self.pages >= p.pages_kept else f" (all would take {size(p.pages_kept * self.page)})"
            text += f"; the rest keeps beginnings that come again{all_of}"
        return text + (f"; {format_percent(p.again)} of the prompts' tokens had come before" if p.again else "")

    def hint(self) -> str:
        """Return a hint if free memory is insufficient; "" otherwise."""
        if self.kv_bytes <= self.free:
            return ""
        smaller = f", or --kv-cache-dtype int8 ({size(self.pages * self.int8)})" if self.int8 < self.page else ""
        return f"{size(max(self.free, 0))} are free beside the weights: raise that, lower --max-batch{smaller}"

    def summary(self) -> dict[str, Any]:
        c, p = self.chosen, self.chosen.proposal
        choices = [
            *(choice.summary() for choice in c.choices),
            {"setting": "kv_memory", "value": self.kv_bytes, "default": self.default_kv_bytes, "source": "traffic",
             "why": self.reason(), "flag": self.flag, "hint": self.hint() or None},
        ]  # fmt: skip
        return {
            "file": c.name, "requests": len(c.recording), "span_s": c.recording.span_s, "part": c.part,
            "of_part": p.n, "lengths": p.lengths, "unfit": p.n_unfit, "again": p.again,
            "choices": choices,
            "saved": {
                "kv_bytes": self.default_kv_bytes - self.kv_bytes,
                "context_tokens": c.default("max_context") - c.value("max_context"),
                "tune_s": c.default("tune") - c.value("tune"),
            },
            "parts": [self._part(part, proposal) for part, proposal in c.parts],
        }  # fmt: skip

    def _part(self, part: DayPart, p: Proposal) -> dict[str, Any]:
        batch = p.batch or self.chosen.default("max_batch")
        return {
            "part": part.name, "first_hour": part.first, "end_hour": part.end, "requests": p.n,
            "max_context": p.context, "max_batch": batch, "tune_rows": str(p.rows),
            "kv_memory": self.kv_pages(p, p.context, batch) * self.page,
        }  # fmt: skip


def show_traffic(figures: Figures) -> None:
    """Print the choices made from traffic."""
    c, p = figures.chosen, figures.chosen.proposal
    summary = figures.summary()
    part_text = "" if c.part == "all" else f", {p.n:,} of them by {c.part}"
    heading(f"{c.name}: {len(c.recording):,} requests in {format_duration(c.recording.span_s)}{part_text}")
    rows = [(name, _lengths(p.lengths[name])) for name in ("input", "output")]
    rows += [
        (NAMES[choice.setting], _line(choice, _format_value(choice.value), _format_value(choice.default)))
        for choice in c.choices
    ]
    kv = TrafficChoice("kv_memory", None, None, "traffic", figures.reason())
    rows += [("KV memory", _line(kv, size(figures.kv_bytes), size(figures.default_kv_bytes)))]
    rows += [("", hint)] if (hint := figures.hint()) else []
    rows += [("saved", _saved(figures))]
    if not c.parts:
        if c.recording.span_s < 24 * 3600:
            rows += [
                (
                    "hours",
                    f"the recording spans {format_duration(c.recording.span_s)}, and tells nothing of other hours",
                )
            ]
    else:
        rows += [(part["part"], _of_part(part, c.recording.dated)) for part in summary["parts"]]
        if c.part == "all":
            rows += [("", "this engine serves all hours; --traffic-part day, night or both builds one for each")]
    pairs(rows)


def _line(choice: TrafficChoice, value: str, default: str) -> str:
    by = {"flag": "as its flag says", "default": "the default", "traffic": f"default {default}"}[choice.source]
    return f"{value} ({by}): {choice.reason}"


def _format_value(value: Any) -> str:
    return f"{value:g} s" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _lengths(lengths: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in lengths.items()) + " tokens"


def _saved(figures: Figures) -> str:
    c = figures.chosen
    parts = [
        _less("KV memory", figures.kv_bytes, figures.default_kv_bytes, size),
        _less("context", c.value("max_context"), c.default("max_context"), lambda n: f"{n:,.0f} tokens"),
        _less("tuning", c.value("tune"), c.default("tune"), lambda s: f"{s:g} s"),
    ]
    return "; ".join(parts)


def _less(label: str, now: float, before: float, shown: Any) -> str:
    if now == before:
        return f"{label} as by default"
    change = 1 - now / before if before else 0.0
    return f"{label} {shown(now)} rather than {shown(before)} ({abs(change):.0%} {'less' if change > 0 else 'more'})"


def _of_part(part: Mapping[str, Any], dated: bool) -> str:
    hours = f"{part['first_hour']:02}:00 to {part['end_hour']:02}:00" + (
        " UTC" if dated else " of the recording's days"
    )
    return (
        f"{hours}, {part['requests']:,} requests: context {part['max_context']:,}, batch {part['max_batch']}, "
        f"rows {part['tune_rows']}, KV memory {size(part['kv_memory'])}"
    )
