"""Runs a benchmark with progress in the terminal; Ctrl-C ends it in order."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import uvloop

from millrace.bench.run.run import Run
from millrace.cli.console import Progress, progress

T = TypeVar("T")
Begins = Callable[[Run], None]


def run_with_progress(work: Callable[[Begins], Awaitable[T]], quiet: bool) -> T:
    """Run `work` and return its result; `work` calls its argument with each run that starts.

    Ctrl-C stops the current run (see its `ended`), a second Ctrl-C the command.
    """
    with progress(quiet) as tell, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_stoppable(work, tell))


async def _stoppable(work: Callable[[Begins], Awaitable[T]], tell: Progress) -> T:
    loop, running, stopped = asyncio.get_running_loop(), list[Run](), False
    ticking = loop.create_task(_tick(running, tell))

    def stop() -> None:
        nonlocal stopped
        stopped = True
        loop.remove_signal_handler(signal.SIGINT)
        running[-1].stop("Ctrl-C")

    def begins(run: Run) -> None:
        if not running:
            loop.add_signal_handler(signal.SIGINT, stop)  # from here on there is something to report
        if stopped:  # it came between two runs
            run.ended = "Ctrl-C"
        running.append(run)

    try:
        return await work(begins)
    finally:
        ticking.cancel()
        loop.remove_signal_handler(signal.SIGINT)  # what comes now is Python's own again


async def _tick(running: list[Run], tell: Progress) -> None:
    """Show the progress ten times a second, which costs the client little."""
    while True:
        if running:
            run = running[-1]
            n, load = len(run.records), run.load
            message = f"run {len(running)}: " * (len(running) > 1) + f"{n} answers, {run.n_running} running"
            if load.n_sessions is not None:
                tell(message, min(n, load.n_sessions), load.n_sessions)
            elif load.duration_s is not None:
                passed_s, whole_s = time.perf_counter() - run.started_s, round(load.duration_s)
                tell(message, min(round(passed_s), whole_s), whole_s)
            else:
                tell(message, n, 0)
        await asyncio.sleep(0.1)
