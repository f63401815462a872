"""A run as a result file and as tables to read: speeds, shares of the machine's limits, goals met and missed."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import counted
from benchmarks.peers.engine import CATALOGUE
from benchmarks.peers.goals import outcomes
from benchmarks.peers.race import Course, Race
from benchmarks.peers.samples import Samples
from benchmarks.peers.weights import multiply_operations
from benchmarks.peers.workloads import Phase
from benchmarks.record import provenance
from benchmarks.runs import kl_class, numbers_of, own_kl, shown_flags
from benchmarks.shapes import SHAPES
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.config.model_config import ModelConfig
from millrace.kernels.library import usable_isas

_STYLES = {"goal met": "green", "milestone met": "yellow", "not ": "yellow"}


class Findings:
    """Everything that is derived from the samples of one run."""

    def __init__(self, course: Course, found: Race) -> None:
        self._course, self._found = course, found
        self._samples = Samples(found.samples)
        self._workloads = {w.name: w for w in course.workloads}
        self._bandwidth = self._shares_of_bandwidth()

    def result(self) -> dict[str, Any]:
        """The result file."""
        c, found = self._course, self._found
        return {
            **provenance("benchmarks.peers"), "shape": subject_name(c.shape), "threads": c.threads,
            "isa": c.isa or usable_isas()[0], "hidden": c.isa is not None, "flags": sorted(shown_flags()),
            "text": found.text, "rounds": c.rounds, "load_average": found.load,
            "peaks_per_s": [asdict(p) for p in found.peaks],
            "workloads": {w.name: asdict(w) for w in c.workloads}, "engines": found.engines,
            "left_out": found.left_out, "summary": self.summary(), "goals": self.goals(),
            "samples": [asdict(s) for s in found.samples],
        }  # fmt: skip

    def summary(self) -> list[dict[str, Any]]:
        """One entry for each engine and workload."""
        entries = []
        for workload in self._course.workloads:
            for engine in self._found.engines:
                median_s = self._samples.median_s(workload.name, engine)
                if median_s is not None:
                    entries.append({
                        "workload": workload.name, "engine": engine, "median_s": median_s,
                        "tokens_per_s": round(workload.tokens / median_s, 1),
                        "share_of_limit": (share := self.share(workload.name, engine)) and round(share, 3),
                    })  # fmt: skip
        return entries

    def goals(self) -> list[dict[str, Any]]:
        s, name = self._samples, subject_name(self._course.shape)
        found = outcomes(name, s.speedup, s.fastest, self.share, self._kl, self._course.rounds)
        return [o.as_dict() for o in found]

    def _kl(self, engine: str) -> float | None:
        """As `benchmarks.perplexity` measured it on the real model, for these numbers or weights made alike."""
        described = self._found.engines.get(engine)
        if described is not None and (own := own_kl(described)) is not None:
            return own
        return None if described is None else kl_class(engine, numbers_of(engine, described))

    def share(self, workload: str, engine: str) -> float | None:
        """Decode: of the read bandwidth, reading the weights once a step; prefill: of the instructions' peak."""
        w = self._workloads.get(workload)
        median_s = self._samples.median_s(workload, engine)
        if w is None or median_s is None or engine not in self._found.engines:
            return None
        if w.phase is Phase.DECODE:
            return self._bandwidth[workload, engine]
        peak = statistics.median(getattr(p, CATALOGUE[engine].precision) for p in self._found.peaks)
        rate = multiply_operations(config_of(self._course.shape)) * w.tokens / median_s
        return rate / peak if 0 < rate <= peak else None

    def _shares_of_bandwidth(self) -> dict[tuple[str, str], float | None]:
        """Of each workload that decodes and each engine; all or none of them count."""
        shares = {
            (w.name, name): self._samples.share_of_bandwidth(w.name, name, e["read_bytes_per_step"] * w.steps)
            for w in self._course.workloads if w.phase is Phase.DECODE
            for name, e in self._found.engines.items()
        }  # fmt: skip
        return dict(zip(shares, counted([*shares.values()]), strict=True))


def subject_name(subject: str) -> str:
    """A shape's name, or a model file's without its folder."""
    return subject if subject in SHAPES else Path(subject).stem


def config_of(subject: str) -> ModelConfig:
    return SHAPES[subject] if subject in SHAPES else Checkpoint.open(Path(subject)).decoder


def show(result: dict[str, Any], console: Console) -> None:
    """What a result file says, in tables."""
    names = list(result["workloads"])
    console.print(_speeds(result, names))
    rates = sorted((s["read_before"] + s["read_after"]) / 2e9 for s in result["samples"])
    if rates:
        console.print(f"read bandwidth beside the samples: {rates[0]:.0f} to {rates[-1]:.0f} GB/s", highlight=False)
    console.print(f"load average at the start of each round: {result['load_average']}", highlight=False)
    for name, reason in result["left_out"].items():
        console.print(f"left out: {name}: {reason}", style="yellow", highlight=False, markup=False)
    if result["goals"]:
        console.print(_goals(result["goals"]))


def _speeds(result: dict[str, Any], workloads: Sequence[str]) -> Table:
    table = Table(title=f"{result['shape']}, tokens/s (share of the peak or of the read bandwidth)")
    table.add_column("engine")
    cells = {(e["engine"], e["workload"]): e for e in result["summary"]}
    for name in workloads:
        table.add_column(name, justify="right")
    for engine in result["engines"]:
        found = [cells.get((engine, w)) for w in workloads]
        table.add_row(engine, *(_cell(c) for c in found))
    return table


def _cell(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return ""
    share = f" ({entry['share_of_limit']:.0%})" if entry["share_of_limit"] else ""
    return f"{entry['tokens_per_s']:,.0f}{share}"


def _goals(goals: Sequence[dict[str, Any]]) -> Table:
    table = Table("goal", "milestone", "goal", "reached", "", title="goals")
    for g in goals:
        reached = "" if g["reached"] is None else f"{g['reached']:.2f}"
        style = next((s for start, s in _STYLES.items() if g["verdict"].startswith(start)), "red")
        table.add_row(g["what"], f"{g['milestone']}", f"{g['goal']}", reached, f"[{style}]{g['verdict']}[/]")
    return table
