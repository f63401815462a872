"""Null servers, each started once for all tests that ask it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from millrace.bench.null_server.ledger import NullTiming
from millrace.bench.null_server.process import NullProcess

Null = Callable[..., NullProcess]


@pytest.fixture(scope="session")
def null() -> Iterator[Null]:
    started: dict[tuple[NullTiming, bool], NullProcess] = {}
    with ExitStack() as stack:

        def start(timing: NullTiming, over_grpc: bool = False) -> NullProcess:
            if (timing, over_grpc) not in started:
                started[timing, over_grpc] = stack.enter_context(NullProcess(timing, over_grpc))
            return started[timing, over_grpc]

        yield start
