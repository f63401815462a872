"""Millrace itself, driven like the others: steps in process, no server."""

import shutil
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

import millrace
from benchmarks.measure import TILES, TUNE_S, pages_for, read_per_step
from benchmarks.names import named
from benchmarks.peers.engine import Description, Floats, IntArray
from benchmarks.peers.timing import seconds
from benchmarks.peers.weights import NamedWeights
from benchmarks.peers.workloads import CONTEXT, MAX_USERS, Phase, Workload
from benchmarks.words import Words
from millrace.api.offline_generate import generate
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.precision import precision_map
from millrace.compile.source import Source
from millrace.compile.tune.tuner import Tuning
from millrace.engine.artifact.engine import Engine
from millrace.engine.dummy_step import dummy_step
from millrace.engine.executor import StepInputs
from millrace.engine.native.executor import NativeExecutor
from millrace.evaluate.divergence import LogProbs, log_probabilities
from millrace.model.families import build_model
from millrace.model.module import Weights
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.sampling_params import SamplingParams
from millrace.runtime.scheduling.token_budget import TokenBudget

DIFFERENCES = 3  # of two long times, of which the middle one is a sample


def load(weights: NamedWeights, variant: str, folder: Path, threads: int) -> "MillraceEngine":
    """`variant`: a precision, precision/its head, precision@isa, or "stored": what nobody asked for; "+generate"
    behind it: as users of `LLM.generate` see it. Groups: the model's own, else 128.

    Built anew each time: an old engine is not this code.
    """
    numbers, _, generates = variant.partition("+")
    numbers, _, isa = numbers.partition("@")
    precision, _, head = numbers.partition("/")
    built = folder / f"millrace-{variant.replace('/', '-')}"
    shutil.rmtree(built, ignore_errors=True)
    source = _source(weights)
    asked = (
        None
        if precision == "stored"
        else precision_map(
            precision, source.own_precision.group, head or None, stored_groups=source.own_precision.stored_groups
        )
    )
    options = BuildOptions(precision=asked, max_batch=MAX_USERS, tiles=TILES)
    write_engine(source, plan_engine(source, options), built, name=folder.name, tuning=Tuning(TUNE_S))
    kind = GeneratingEngine if generates else MillraceEngine
    return kind(Engine.open(built), threads, isa or None)


def _source(weights: NamedWeights) -> Source:
    if weights.file is not None:
        return Source.from_checkpoint(Checkpoint.open(weights.file), CONTEXT)
    return Source(
        module=build_model(weights.config), weights=Weights(weights.shapes, weights.load), max_context=CONTEXT,
        architecture=weights.config.architecture, dtype=weights.config.dtype,
    )  # fmt: skip


class MillraceEngine:
    def __init__(self, engine: Engine, threads: int, isa: str | None = None, n_pages: int | None = None) -> None:
        """n_pages: None, as many as the longest prompt of one user needs, more than the short ones of all together"""
        self._engine = engine
        pages = pages_for(1, CONTEXT) if n_pages is None else n_pages
        self.executor: NativeExecutor = engine.executor(n_pages=pages, threads=threads, isa=isa)

    def describe(self) -> Description:
        m = self._engine.manifest
        return Description(
            millrace.__version__, **named(self._engine), weights_bytes=m.cpu.weights_bytes,
            read_bytes_per_step=read_per_step(self._engine),
            settings={"precision": m.precision, "group": m.group, "isa": self.executor.isa},
        )  # fmt: skip

    def warm_up(self, workload: Workload) -> None:
        self.run(workload)

    def run(self, workload: Workload) -> float:
        prompt, decode = self._steps(workload)
        if workload.phase is Phase.PREFILL:
            return seconds(lambda: self._run(prompt))
        self._run(prompt)
        return seconds(lambda: self._run(decode))

    def logits(self, prompt: Sequence[int]) -> Floats:
        n, limits = len(prompt), self.executor.limits
        step = dummy_step([n], 0, limits.n_pages, vocab=limits.vocab_size)
        self.executor.run(replace(step, tokens=np.array(prompt, np.int32)))
        row: Floats = self.executor.output("logits")[0].astype(np.float32)
        return row

    def read(self, ids: IntArray, first: int) -> LogProbs:
        return log_probabilities(self.executor, ids, first)

    def _run(self, steps: list[StepInputs]) -> None:
        for s in steps:
            self.executor.run(s)

    def _steps(self, w: Workload) -> tuple[list[StepInputs], list[StepInputs]]:
        limits = self.executor.limits
        chunk = limits.max_step_tokens // w.users
        prompt = [
            dummy_step([min(chunk, w.prompt - at)] * w.users, at, limits.n_pages, vocab=limits.vocab_size)
            for at in range(0, w.prompt, chunk)
        ]
        decode = [
            dummy_step([1] * w.users, w.prompt + i, limits.n_pages, seed=i, vocab=limits.vocab_size)
            for i in range(w.new)
        ]
        return prompt, decode


class GeneratingEngine(MillraceEngine):
    """Through the scheduler, with sampling and text; decode is what further tokens take beyond the first ones."""

    def __init__(self, engine: Engine, threads: int, isa: str | None = None) -> None:
        super().__init__(engine, threads, isa)
        limits = self.executor.limits
        budget = TokenBudget.unhurried(limits.max_step_tokens)  # as LLM has it
        self._loop = EngineLoop(self.executor, Words(limits.vocab_size), budget=budget, prefix_cache=False)

    def run(self, workload: Workload) -> float:
        if workload.phase is Phase.PREFILL:
            return seconds(lambda: self._generate(workload, 1))
        return statistics.median(self._longer(workload) for _ in range(DIFFERENCES))

    def _longer(self, w: Workload) -> float:
        """Seconds by which so many more tokens take longer: the first one's are most of both."""
        first = seconds(lambda: self._generate(w, 1))
        return seconds(lambda: self._generate(w, 1 + w.new)) - first

    def _generate(self, w: Workload, tokens: int) -> None:
        ids = np.random.default_rng(0).integers(0, self.executor.limits.vocab_size, (w.users, w.prompt)).tolist()
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        generate(self._loop, [{"prompt_token_ids": row} for row in ids], [params] * w.users)
