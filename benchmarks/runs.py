"""Result files as the runs that pages are made of: which numbers, on which machine, how fast, with their spread."""

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers.engine import CATALOGUE
from benchmarks.record import RESULTS
from millrace.engine.cache_specs import KV_FORMATS
from millrace.machine.cpu import cpu_flags

Result = dict[str, Any]
REAL = "SmolLM2-135M-Instruct.Q4_1"  # the real model that is measured: a file's name
ROUNDED_KV = {kept.name for kept in KV_FORMATS.values() if kept.numbers}  # whose own loss a score's KL has as well


@dataclass(frozen=True, slots=True)
class Numbers:
    """In which numbers an engine computes."""

    weights: str
    activations: str
    head: str
    attention: str = ""  # where its sums are not the plain ones; files from before this was told say nothing

    def __str__(self) -> str:
        return " / ".join(filter(None, (self.weights, self.activations, self.head, self.attention)))

    @classmethod
    def of(cls, described: Result) -> "Numbers":
        """As `benchmarks.names` says them."""
        d = described
        return cls(d["weights"], d["activations"], d["head"], d.get("attention", ""))


@dataclass(frozen=True, slots=True)
class Speed:
    """One engine on one workload in one run; tokens a second."""

    subject: str
    engine: str
    numbers: Numbers
    workload: str
    median: float
    low: float
    high: float
    weights_bytes: int | None
    run: Result
    own_kl: float | None = None  # as this run measured it

    def __str__(self) -> str:
        return f"{self.median:,.0f} ({self.low:,.0f}-{self.high:,.0f})"


# Runs of 2026-11-20 do not name their numbers: these are what our engines were set to, and what others' settings say.
_EARLIER = {
    "millrace-w4a8": Numbers("int4, groups of 128", "int8, groups of 128", "w4a8, its best 256 again in w8a8"),
    "millrace-w4a8-avx2": Numbers("int4, groups of 128", "int8, groups of 128", "w4a8, its best 256 again in w8a8"),
    "millrace-w8a8": Numbers("int8, groups of 128", "int8, groups of 128", "w8a8"),
    "millrace-bf16": Numbers("bf16", "bf16", "bf16"),
    "transformers-bf16": Numbers("bf16", "bf16", "bf16"),
}
_NOT_RECORDED = "not recorded"


def _earlier(engine: str, settings: Result) -> Numbers:
    if engine in _EARLIER:
        return _EARLIER[engine]
    if "tensors" in settings:  # llama.cpp: how many matrices are of which type
        types = sorted(settings["tensors"].items(), key=lambda t: -t[1])
        return Numbers(", ".join(f"{n} {kind}" for kind, n in types), _NOT_RECORDED, _NOT_RECORDED)
    return Numbers(settings.get("weights", _NOT_RECORDED), _NOT_RECORDED, _NOT_RECORDED)


@cache
def _read(path: Path) -> Result:
    """No file changes that is there: no run replaces another's."""
    result: Result = json.loads(path.read_text())
    return {**result, "file": path.name}


def results() -> list[tuple[str, Result]]:
    """(file name, content), oldest first."""
    found = [(path.name, _read(path)) for path in sorted(RESULTS.glob("*.json"))]
    return sorted(found, key=lambda f: (f[1].get("time", f[1]["date"]), f[0]))


def kind(result: Result) -> str:
    """Which benchmark it is of: "peers", "perplexity", ...; "alone" for `python -m benchmarks`."""
    module = str(result["command"]).split()[2]
    return module.partition(".")[2] or "alone"


def of_kind(wanted: str) -> list[tuple[str, Result]]:
    return [(name, result) for name, result in results() if kind(result) == wanted]


def host(result: Result) -> str:
    machine = result["machine"]
    number = f" ({machine['cpu_number']})" if machine.get("cpu_number") else ""  # files from before have none
    return f"{machine['cores']} cores of {machine['cpu'].replace(' Processor', '')}{number}"


def label(result: Result) -> str:
    """A run in a table: when, of which commit (+: with changes that were not committed), where, in which file."""
    when = str(result.get("time") or result["date"])[:16].replace("T", " ")
    return f"{when}, {result['commit']}, {host(result)}, {file_of(result)}"


def file_of(result: Result) -> str:
    """Return the name of a run's result file, as a document shows it."""
    return f"`{result['file']}`" if "file" in result else "not kept yet"


def kl_from(found: Iterable[Speed]) -> str:
    """Name the files of the KL that stands beside these speeds; empty if none has one."""
    files = sorted({file for s in found if (file := kl_file(s.engine, s.numbers)) is not None})
    return f"KL from {', '.join(f'`{file}`' for file in files)}." if files else ""


def speeds(result: Result) -> Iterator[Speed]:
    """All of a run beside other engines, or alone."""
    if kind(result) == "peers":
        for name, described in result["engines"].items():
            for workload in result["workloads"].values():
                speed = _of_samples(result, name, described, workload)
                if speed is not None:
                    yield speed
    elif kind(result) == "alone":
        yield from _alone(result)


def numbers_of(engine: str, described: Result) -> Numbers:
    """Return what an engine's description in a result file says, or what is known of files from before it did."""
    if "activations" in described:
        return Numbers.of(described)
    return _earlier(engine, described.get("settings", {}))


def _of_samples(result: Result, engine: str, described: Result, workload: Result) -> Speed | None:
    size = workload["prompt"] if workload["phase"] == "prefill" else workload["users"]
    name = f"{workload['phase']}-{size}"
    tokens = workload["users"] * (workload["prompt"] if workload["phase"] == "prefill" else workload["new"])
    seconds = [s["seconds"] for s in result["samples"] if s["engine"] == engine and s["workload"] == name]
    return _speed(result, engine, described, name, tokens, seconds) if seconds else None


def _alone(result: Result) -> Iterator[Speed]:
    engine, p = f"millrace-{result['precision']}", result["prefill"]
    yield _speed(result, engine, result, f"prefill-{p['tokens']}", p["tokens"], p["samples_s"])
    for d in result["decode"]:
        tokens = round(d["tokens_per_s"] * statistics.median(d["samples_s"]))
        yield _speed(result, engine, result, f"decode-{d['sequences']}", tokens, d["samples_s"])


def _speed(
    result: Result, engine: str, described: Result, workload: str, tokens: int, seconds: Sequence[float]
) -> Speed:
    return Speed(
        result["shape"], engine, numbers_of(engine, described), workload, tokens / statistics.median(seconds),
        tokens / max(seconds), tokens / min(seconds), described.get("weights_bytes"), result, own_kl(described),
    )  # fmt: skip


# What a result file from before builds said what they leave unused does not hold, by the time of the run.
_REMARKS = {
    "2026-11-21T22:04:21Z": (
        "llama.cpp was built for AVX-512 without AMX: its AMX build ends in a segmentation fault on this file"
    ),
}


# Why a peer's build leaves an instruction set of the processor unused (benchmarks/peers/build.py).
_WHY_UNUSED = {
    "AMX_INT8": "its AMX build ends in a segmentation fault on this file",
    "AVX_VNNI": "its builds up to 2026-11-22 did not turn AVX_VNNI on",
}


def remarks(result: Result) -> list[str]:
    """How peers were built, where a reader who compares must know it."""
    known = [_REMARKS[result["time"]]] if result.get("time") in _REMARKS else []
    told = ((name, e.get("settings", {}).get("unused")) for name, e in result["engines"].items())
    return known + [
        f"{name} was built without {' and '.join(unused)}"
        + "".join(f"; {_WHY_UNUSED[u]}" for u in unused if u in _WHY_UNUSED)
        for name, unused in told
        if unused
    ]


def left_out(result: Result) -> list[str]:
    """Engines that were to run and could not, each with the reason."""
    return [f"{name}: {reason}" for name, reason in result.get("left_out", {}).items()]


def own_kl(described: Result) -> float | None:
    """Of an engine's answers in the run itself; None: they were not compared."""
    found: float | None = described.get("answers", {}).get("kl")
    return found


_TOLD_FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")


def shown_flags() -> list[str]:
    """The instruction sets of this processor that decide how fast a language model is."""
    flags = cpu_flags()
    return [flag for flag in _TOLD_FLAGS if flag in flags]


def kl_class(engine: str, numbers: Numbers) -> float | None:
    """Of an engine that was timed, on the real model: of these very numbers, else of the peer that makes its weights
    in the same way (`benchmarks.recipes`). It is the weights' class: where rows of the real model do not divide into
    a peer's blocks, it is that of the blocks that it falls back to, with their activations."""
    found = accuracy().get(REAL, {}).get(numbers)
    return made_alike().get(engine) if found is None else found


def kl_file(engine: str, numbers: Numbers) -> str | None:
    """Return the name of the result file from which `kl_class` is."""
    found = _measured().get(REAL, {}).get(numbers) or _alike().get(engine)
    return None if found is None else found.file


class _Divergence(NamedTuple):
    kl: float
    file: str


@cache
def made_alike() -> dict[str, float]:
    """By the catalogue's name, from the newest run of each."""
    return {engine: found.kl for engine, found in _alike().items()}


def _alike() -> dict[str, _Divergence]:
    return {
        score["precision"]: _Divergence(score["mean_kl"], result["file"])
        for _, result in of_kind("perplexity") if result["model"] == REAL
        for score in result["scores"] if score["precision"] in CATALOGUE
    }  # fmt: skip


def _text_of(result: Result) -> tuple[str, int]:
    return result.get("text", ""), result.get("tokens", 0)


@cache
def accuracy() -> dict[str, dict[Numbers, float]]:
    """By model, the KL in nats of each set of numbers to float32, from the newest run that measured it.

    Of runs that read the text of the newest one, cut as that was: KL depends on both.
    """
    return {model: {numbers: found.kl for numbers, found in of.items()} for model, of in _measured().items()}


def _measured() -> dict[str, dict[Numbers, _Divergence]]:
    runs = [result for _, result in of_kind("perplexity")]
    newest = {r["model"]: _text_of(r) for r in runs}
    found: dict[str, dict[Numbers, _Divergence]] = {}
    for result in (r for r in runs if _text_of(r) == newest[r["model"]]):
        for score in result["scores"]:  # not its heads, whose reference is another
            if "activations" in score and score["kv"] not in ROUNDED_KV:
                of_model = found.setdefault(result["model"], {})
                of_model[Numbers.of(score)] = _Divergence(score["mean_kl"], result["file"])
    return found
