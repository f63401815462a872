"""Null servers, each started once for all tests that ask it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from millrace.bench.null_process import NullProcess
from millrace.bench.null_server import NullTiming

Null = Callable[[NullTiming], NullProcess]


@pytest.fixture(scope="session")
def null() -> Iterator[Null]:
    started: dict[NullTiming, NullProcess] = {}
    with ExitStack() as stack:

        def start(timing: NullTiming) -> NullProcess:
            if timing not in started:
                started[timing] = stack.enter_context(NullProcess(timing))
            return started[timing]

        yield start
