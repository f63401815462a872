"""The tactic tuner: times settings of the kernels' knobs on this machine, inside the program that will run.

A program does the same work in every layer. So the layers of one pass run different settings in turn: all settings see
the machine in the same state, with cold weights, real neighbors and workers that wait for each other. A setting is
chosen if it clearly beats the kernel's default rule; none changes a bit of any result.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from millrace.compile.cache.timing_cache import TimingCache, machine_key
from millrace.compile.settings import Progress
from millrace.compile.tune.tuning_cases import USUAL_ROWS, Case, TunedRows, cases_of, filling, input_bytes, pages_of
from millrace.compile.tune.tuning_regions import TuningTask, regions_of
from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.tactics import (
    Choice,
    Comparison,
    TacticTable,
    TacticTiming,
    TunedRegion,
    knob_values,
    read_tables,
    table_for,
    write_tactics,
)
from millrace.engine.executor import ExecutionError
from millrace.engine.native.executor import NativeExecutor, StatelessExecutor
from millrace.errors import EngineError
from millrace.kernels.library import usable_isas
from millrace.machine.cpu import fingerprint, memory, usable_cores

# Largest share of the default rule's time that a setting may take: smaller differences may be noise. Few samples are
# noisier.
CLEARLY, FEW_CLEARLY = 0.97, 0.94
SAMPLES, SOME, PLENTY = 3, 8, 24  # of each setting: at least; no longer few; enough
Knobs = dict[str, int]
Tuned = NativeExecutor | StatelessExecutor


@dataclass(frozen=True, slots=True)
class Tuning:
    """How long to time (at most twice as long), for how many threads (None: all cores), and the cache of timings."""

    seconds: float
    threads: int | None = None
    cache: TimingCache | None = None
    anew: bool = False  # time even what is cached
    rows: TunedRows = USUAL_ROWS


def tune_folder(folder: Path, tuning: Tuning, progress: Progress | None = None) -> TacticTable:
    """Tune the engine in `folder` for this machine and number of threads; without enough time, old choices stay.

    raises MachineError if the timing cache cannot be read, EngineError if the engine is damaged
    """
    table, tables = tune(Engine.open(folder), tuning, progress), read_tables(folder, ignore_damaged=True)
    if before := table_for(tables, table.machine, table.threads):
        table = load_tuning(before, table)
    elif tables and not table.compared():
        return table  # it holds only default rules, which apply without it
    return write_tactics(folder, table)


def load_tuning(before: TacticTable, new: TacticTable) -> TacticTable:
    """Return the new table, with choices of the old one for regions that the new one did not compare."""
    old = {(region.name, c.rows): c for region in before.regions for c in region.choices if c.compared}
    regions = [
        replace(r, choices=[c if c.compared else old.get((r.name, c.rows), c) for c in r.choices]) for r in new.regions
    ]
    return replace(new, regions=regions)


def tune(engine: Engine, tuning: Tuning, progress: Progress | None = None) -> TacticTable:
    """Time what is not cached, and add it to the cache."""
    cache, isa, threads = tuning.cache, usable_isas()[0], usable_cores() if tuning.threads is None else tuning.threads
    works, cases = regions_of(engine, tuning.rows), cases_of(engine, tuning.rows)
    key = machine_key(isa, threads)
    for name, choices in (cache.read(key) if cache and not tuning.anew else {}).items():
        if name in works:
            works[name].choices = {c.rows: c for c in choices}
    note, missing = "", [c for c in cases if any(w.takes_part(c) and c.rows not in w.choices for w in works.values())]
    if missing and not _fits(engine, tuning.rows):
        note = "not timed: weights, activations and inputs do not fit into the memory that is free"
    elif missing:
        result = _timed(engine, works, missing, _Clock(tuning.seconds, len(missing), progress), threads, tuning.rows)
        try:
            if cache:
                cache.merge(key, result)
        except OSError:
            note = "what was timed could not be kept for other builds: the cache's folder cannot be written"
        late = sorted(
            c.rows for c in missing if any(w.takes_part(c) and c.rows not in w.choices for w in works.values())
        )
        if late:
            note = f"time was up before {', '.join(map(str, late))} rows were timed: millrace tune with more --seconds"
    cases.sort(key=lambda c: c.rows)
    done = [  # regions that were not timed use the default rule, not the best of other rows
        TunedRegion(w.name, w.kernel, w.calls, [w.choice(c.rows) for c in cases if w.takes_part(c)])
        for w in works.values()
    ]
    return TacticTable(fingerprint(isa), threads, done, note)


def choose(tried: Sequence[TacticTiming]) -> int:
    """Return the fastest setting if it clearly beats the default rule, which is the first."""
    best = min(tried, key=lambda t: t.median_us)
    samples = min(best.samples, tried[0].samples)
    clearly = CLEARLY if samples >= SOME else FEW_CLEARLY
    return best.value if samples >= SAMPLES and best.median_us < clearly * tried[0].median_us else tried[0].value


def _fits(engine: Engine, rows: TunedRows) -> bool:
    cpu, kv = engine.manifest.cpu, pages_of(engine, rows) * engine.page_bytes
    return cpu.weights_bytes + cpu.activation_bytes + kv + input_bytes(engine.manifest) < memory().available_bytes


@dataclass(slots=True)
class _Clock:
    """Divides the time among the comparisons, and reports progress."""

    seconds: float
    n_cases: int
    progress: Progress | None
    cases_done: int = 0
    started: float = 0.0

    def start(self) -> None:
        """Start when the weights are loaded."""
        self.started = time.perf_counter()
        if self.progress:
            self.progress("timing kernels", 0, self.n_cases)

    def slice(self, comparisons: int) -> float:
        return self.seconds / (self.n_cases * comparisons)

    @property
    def deadline(self) -> float:
        return self.started + 2 * self.seconds

    @property
    def overdue(self) -> bool:
        return time.perf_counter() > self.deadline

    def begin(self, case: Case) -> None:
        if self.progress:
            self.progress(f"timing kernels with {case.rows} rows", self.cases_done, self.n_cases)
        self.cases_done += 1


def _timed(
    engine: Engine, works: Mapping[str, TuningTask], cases: Sequence[Case], clock: _Clock, threads: int, rows: TunedRows
) -> dict[str, list[Choice]]:
    """Return the choices that were not known before, and add them to `works`."""
    executor: Tuned
    if engine.manifest.is_language_model:
        executor = engine.executor(n_pages=pages_of(engine, rows), threads=threads, tuned=False)
        for step in filling(engine, rows):
            executor.run(step)
    else:
        executor = engine.stateless_executor(threads=threads, tuned=False)
    result: dict[str, list[Choice]] = {}
    clock.start()
    try:
        for case in cases:
            clock.begin(case)
            step = _warmed_up(executor, case, engine)
            pending = [w for w in works.values() if w.takes_part(case) and case.rows not in w.choices]
            compared: dict[str, list[Comparison]] = {w.name: [] for w in pending}
            knobs: dict[str, Knobs] = {w.name: {} for w in pending}
            for knob in [k for k in case.knobs if any(k in w.knobs for w in pending)]:
                if clock.overdue:
                    break
                enough_s = time.perf_counter() + clock.slice(len(case.knobs))
                trial = Trial(executor, case.rows, step, pending, knob, threads)
                for work, tried in trial.compare(knobs, enough_s, clock.deadline):
                    chosen = choose(tried)
                    compared[work.name].append(Comparison(knob, tried, chosen))
                    if chosen:
                        knobs[work.name][knob] = chosen
            if clock.overdue:
                break  # what was not compared completely is unknown
            for work in pending:
                work.choices[case.rows] = Choice(case.rows, knobs[work.name], compared[work.name])
                result.setdefault(work.name, []).append(work.choices[case.rows])
    finally:
        executor.close()
    return result


def _warmed_up(executor: Tuned, case: Case, engine: Engine) -> Any:
    """Run the case's step once to touch its pages and wake the threads. raises EngineError if the program refuses it"""
    step = case.step()
    try:
        executor.run(step)
    except ExecutionError as error:
        raise EngineError(
            f"{engine.folder} cannot be timed: it refuses made-up inputs: {error}",
            "a network that takes noise and zeros", "run it as it is: its kernels go by their rules",
        ) from error  # fmt: skip
    return step


class Trial:
    """One knob of all regions of a case: passes in which their layers try its settings in turn."""

    def __init__(
        self, executor: Tuned, rows: int, step: Any, works: Sequence[TuningTask], knob: str, threads: int
    ) -> None:
        self._executor, self._rows, self._step, self._works, self._knob = executor, rows, step, works, knob
        self._turning = [w for w in works if knob in w.knobs]
        self._settings = {w.name: w.settings(knob, rows, threads) for w in self._turning}
        self._us: dict[str, dict[int, list[float]]] = {n: {s: [] for s in tried} for n, tried in self._settings.items()}

    def compare(
        self, knobs: Mapping[str, Knobs], enough_s: float, end_s: float
    ) -> list[tuple[TuningTask, list[TacticTiming]]]:
        """Time until `enough_s`, or `end_s` if settings lack samples; return nothing if they still do."""
        passes, fewest = 0, 0
        while fewest < PLENTY and time.perf_counter() < (end_s if fewest < SAMPLES else enough_s):
            self._pass(knobs, passes)
            passes += 1
            fewest = min(len(samples) for of_work in self._us.values() for samples in of_work.values())
        if fewest < SAMPLES:
            return []
        return [(w, [summary(v, self._us[w.name][v]) for v in self._settings[w.name]]) for w in self._turning]

    def _pass(self, knobs: Mapping[str, Knobs], number: int) -> None:
        """Run once, with each layer at its next setting; other regions use their choices."""
        turn = {
            call: self._settings[w.name][(i + number) % len(self._settings[w.name])]
            for w in self._turning
            for i, call in enumerate(w.calls)
        }
        tried = {call: {self._knob: value} for call, value in turn.items()}
        self._executor.set_tactics(sorted(
            (call, self._rows, knob_values(w.kernel, {**knobs[w.name], **tried.get(call, {})}))
            for w in self._works for call in w.calls
        ))  # fmt: skip
        self._executor.profile(True)
        self._executor.run(self._step)
        spent = self._executor.profile(False)
        for w in self._turning:
            for call in w.calls:
                self._us[w.name][turn[call]].append(float(spent[call]) * 1e6)


def summary(value: int, microseconds: Sequence[float]) -> TacticTiming:
    """Return the timing of one setting."""
    cut = sorted(microseconds)
    low, high = cut[len(cut) // 10], cut[-1 - len(cut) // 10]
    return TacticTiming(value, round(statistics.median(cut), 2), round(low, 2), round(high, 2), len(cut))
