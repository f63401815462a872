"""Round after round, every engine takes its turn on every workload, and measures the machine beside itself."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.child import Child, EngineFailedError
from benchmarks.peers.engine import CATALOGUE, Floats, IntArray
from benchmarks.peers.samples import Peaks, Sample
from benchmarks.peers.workloads import Workload
from millrace.engine.roofline_probe import peak_rates
from millrace.evaluate.divergence import DivergenceScore
from millrace.kernels.library import usable_isas
from millrace.machine.cpu import load

Say = Callable[[str], None]
UNCOUNTED = -1  # a round
REFERENCE = "millrace-fp32"  # beside whose answers to a text those of all others stand
EXACT = "millrace-bf16"  # beside whose logits those of all others stand
# Four bits of random weights leave 0.69 to 0.79 of it, a real model's 0.99; logits of another model about 0.
LEAST_CORRELATION = 0.5


@dataclass(slots=True)
class Race:
    """What a run found out; engines that could not take part are in `left_out` with the reason."""

    samples: list[Sample] = field(default_factory=list)
    peaks: list[Peaks] = field(default_factory=list)
    load: list[float] = field(default_factory=list)  # of the machine, at the start of each round
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    text: str = ""  # that the answers were compared on; empty: none


@dataclass(frozen=True, slots=True)
class Text:
    """Sequences of one length; of each, the tokens behind position `first` are predicted."""

    name: str
    sequences: Sequence[IntArray]
    first: int

    @property
    def n_scored(self) -> int:
        return sum(len(ids) - 1 - self.first for ids in self.sequences)


@dataclass(frozen=True, slots=True)
class Course:
    shape: str  # or the path of a GGUF file
    engines: Sequence[str]
    workloads: Sequence[Workload]
    rounds: int
    threads: int
    folder: Path  # where exported weights, engines and logs are kept
    isa: str | None = None  # the widest instruction set that anybody may use; None: all of the processor's
    text: Text | None = None  # to compare answers on, beside float32

    @property
    def work(self) -> Path:
        """Where the environments of peers are."""
        return self.folder.parent


def race(course: Course, say: Say) -> Race:
    """One round more than asked: the first, behind each engine's own warm-up, is not counted."""
    found = Race()
    logits: dict[str, Floats] = {}
    with ExitStack() as stack:
        children = _start(course, found, stack, say)
        ready_s = {name: child.ready_s for name, child in children.items()}
        for workload in course.workloads:
            for name in list(children):
                say(f"warm-up, {workload.name}, {name}")
                _ask(children, name, "warm_up", workload.name, found)
        for workload in course.workloads:
            _turns(children, workload, UNCOUNTED, course, found, say)
        for at in range(course.rounds):
            found.load.append(round(load(), 2))
            found.peaks.append(_peaks(course.threads))
            for workload in course.workloads:
                _turns(children, workload, at, course, found, say)
        for name in list(children):
            if described := _ask(children, name, "describe", "", found):
                logits[name] = np.array(described.pop("logits"), np.float32)
                found.engines[name] = {
                    **described, "arithmetic": CATALOGUE[name].precision, "ready_s": round(ready_s[name], 2)
                }  # fmt: skip
        if course.text is not None:
            _read(course, course.text, children, found, say)
    for name, of_exact in agreement(logits).items():
        _checked(found, name, of_exact)
    return found


def _checked(found: Race, name: str, correlation: float) -> None:
    """Notes how an engine's logits correlate with ours; one that computes another model is left out with all it did."""
    if correlation >= LEAST_CORRELATION:
        found.engines[name]["correlation"] = correlation
        return
    del found.engines[name]
    found.samples = [s for s in found.samples if s.engine != name]
    found.left_out[name] = (
        f"it computes another model: its logits correlate {correlation:.3f} with those of {EXACT}, "
        f"at least {LEAST_CORRELATION} is asked"
    )


def agreement(logits: Mapping[str, Floats]) -> dict[str, float]:
    """How each engine's logits correlate with those of ours in BF16; nothing where that did not run."""
    exact = logits.get(EXACT)
    if exact is None:
        return {}
    return {name: round(float(np.corrcoef(found, exact)[0, 1]), 5) for name, found in logits.items()}


def _start(course: Course, found: Race, stack: ExitStack, say: Say) -> dict[str, Child]:
    children: dict[str, Child] = {}
    for name in course.engines:
        entry = CATALOGUE[name]
        if missing := entry.missing(course.work, course.isa):
            found.left_out[name] = f"lacking: {', '.join(missing)}"
            say(f"left out: {name}: {found.left_out[name]}")
            continue
        say(f"exporting and loading, {name}")
        child = stack.enter_context(_child(course, name))
        try:
            child.wait_until_ready()  # one after the other: they share exported files
        except EngineFailedError as error:
            found.left_out[name] = str(error)
            say(f"left out: {name}: {error}")
        else:
            children[name] = child
    return children


def _child(course: Course, name: str) -> Child:
    entry = CATALOGUE[name]
    environment, python = entry.environment(course.work, course.isa), entry.python(course.work, course.isa)
    return Child(name, course.shape, course.folder, course.threads, environment, python)


def _read(course: Course, text: Text, children: dict[str, Child], found: Race, say: Say) -> None:
    """How far each engine's answers are from float32's, which is loaded for this and not timed."""
    file = course.folder / f"text-{text.first}.npy"
    np.save(file, np.stack(text.sequences))
    with _child(course, REFERENCE) as reference:
        reference.wait_until_ready()
        exact = _answers(reference, file)
    assert exact is not None
    found.text = f"{text.n_scored:,} tokens of {text.name}"
    for name in list(children):
        say(f"reading, {name}")
        try:
            answers = _answers(children[name], file)
        except EngineFailedError as error:  # its speeds stand
            found.engines[name]["answers"] = {"failed": str(error)}
            continue
        if answers is not None:
            score = DivergenceScore()
            for one, of_exact, ids in zip(answers, exact, text.sequences, strict=True):
                score.add(one, of_exact, ids[text.first + 1 :])
            found.engines[name]["answers"] = {
                "kl": score.mean_kl, "perplexity": score.perplexity, "ratio": score.ratio, "agreement": score.agreement
            }  # fmt: skip


def _answers(child: Child, text: Path) -> Floats | None:
    """raises EngineFailedError"""
    out = child.ask("read", str(text))["read"]
    if out is None:
        return None
    answers: Floats = np.load(out)
    Path(out).unlink()
    return answers


def _turns(children: dict[str, Child], workload: Workload, at: int, course: Course, found: Race, say: Say) -> None:
    """One sample of each; who begins changes from round to round."""
    names = list(children)
    first = at % max(1, len(names))
    for name in names[first:] + names[:first]:
        turn = "uncounted round" if at == UNCOUNTED else f"round {at + 1} of {course.rounds}"
        say(f"{turn}, {workload.name}, {name}")
        reply = _ask(children, name, "run", workload.name, found)
        if reply and at != UNCOUNTED:
            found.samples.append(Sample(at, workload.name, name, **reply))


def _ask(children: dict[str, Child], name: str, do: str, workload: str, found: Race) -> dict[str, Any] | None:
    """None where the engine died of it; it takes no further part."""
    try:
        return children[name].ask(do, workload)
    except EngineFailedError as error:
        found.left_out[name] = f"{do} {workload}: {error}"
        del children[name]
        return None


def _peaks(threads: int) -> Peaks:
    isa = usable_isas()[0]
    return Peaks(*(statistics.median(peak_rates(isa, kind, threads)) for kind in ("int8", "bf16")))
