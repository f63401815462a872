"""`millrace bench --engine`: the load on an engine in this process; and `bench compare` of two of them."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

from millrace.bench.analysis.compare import ComparedRun, run_interleaved
from millrace.bench.client.in_process import EngineClient
from millrace.bench.load.prompt_text import PromptWords
from millrace.bench.run.plan import BenchPlan, drive, make_plan
from millrace.bench.run.run import Run
from millrace.bench.settings import InputSettings, LoadSettings, SessionSettings, TargetSettings
from millrace.cli.bench.foreign_flags import reseed
from millrace.cli.bench.progress import Begins, run_with_progress
from millrace.cli.open_model import engine_of, opened
from millrace.cli.options import make_settings
from millrace.compile.settings import BuildSettings
from millrace.env import Env
from millrace.errors import ConfigError
from millrace.runtime.open_engine import RunningModel, open_engine
from millrace.runtime.settings import RunSettings

QUEUED = 64  # default number of requests


def make_in_process_plan(engine: str, options: dict[str, Any], round_: int = 0) -> BenchPlan:
    """Create the plan of a run in this process. raises ConfigError

    All requests are queued at once unless a rate, a concurrency or a timed trace is given.
    """
    target_settings, load, inputs = (
        make_settings(TargetSettings, options),
        make_settings(LoadSettings, options),
        make_settings(InputSettings, options),
    )
    if target_settings != TargetSettings():
        raise ConfigError("--engine beside flags of a server's requests", "lengths and a load", "leave them out")
    queued = load.concurrency is None and load.request_rate is None
    if queued and inputs.input_file is None:
        n = load.request_count or QUEUED
        load = replace(load, concurrency=n, request_count=n if load.duration_s is None else load.request_count)
    plan = make_plan(
        engine,
        target_settings,
        reseed(load, round_),
        inputs,
        make_settings(SessionSettings, options),
        in_process=True,
    )
    if queued and plan.load.concurrency == 1 and inputs.input_file is not None:  # a file without times
        return replace(plan, load=replace(plan.load, concurrency=QUEUED))
    return plan


async def _run_plan(model: RunningModel, plan: BenchPlan, begins: Callable[[Run], None]) -> Run:
    async with EngineClient(model.loop(), plan.load.seed) as client:
        return await drive(client, plan, plan.sessions(PromptWords()), begins)


def in_process(engine: str, plan: BenchPlan, build: BuildSettings, run: RunSettings, env: Env, *, quiet: bool) -> Run:
    """The protocol of published tables: no HTTP, no template, random tokens, exact lengths."""
    with opened(engine, build, run, env, quiet=quiet) as model:

        async def work(begins: Begins) -> Run:
            return await _run_plan(model, plan, begins)

        return run_with_progress(work, quiet)


def compared_engines(
    engines: tuple[str, str], options: dict[str, Any], rounds: int, env: Env, quiet: bool
) -> tuple[ComparedRun, ComparedRun]:  # fmt: skip
    """Both are built before the first round; each has the machine to itself in its rounds, and begins them without
    what it remembers of the last."""
    make_in_process_plan(engines[0], options)  # complains at once
    built = {engine: engine_of(engine, BuildSettings(), env, quiet=quiet) for engine in engines}

    async def measuring(plan: BenchPlan, begins: Callable[[Run], None]) -> Run:
        with closing(open_engine(*built[plan.engine], RunSettings())) as model:
            return await _run_plan(model, plan, begins)

    a, b = ((lambda i, engine=engine: make_in_process_plan(engine, options, i)) for engine in engines)
    return run_with_progress(lambda begins: run_interleaved(a, b, rounds, begins, measuring), quiet)
