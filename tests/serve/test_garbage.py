"""What a request held is given back when it ends, not when the interpreter next looks for cycles."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from _pytest.mark import ParameterSet

from millrace.runtime.kv.int_buffer import IntBuffer
from millrace.runtime.request.request import Request, Sequence
from millrace.runtime.service import RequestHandle
from tests.runtime.clients import GREEDY, answered
from tests.runtime.fakes import limits, make_loop
from tests.serve.support import ROOMY, Fake, Running, connect, post, running, until
from tests.serve.test_pipelines import completion

HELD = (Request, Sequence, RequestHandle, IntBuffer)
ASKED = {"prompt": [5] * 300, "max_tokens": 3, "seed": 1, "ignore_eos": True}


pytestmark = pytest.mark.usefixtures("small_heap")


def alive() -> int:
    """Of what was made since this module began."""
    return sum(type(one) in HELD for one in gc.get_objects())


@contextmanager
def without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def leaves_early(server: Running) -> None:
    aborted = server.stats().finished_total.copy()
    with connect(server) as raw:
        raw.sendall(completion(max_tokens=400, stream=True))
        until(lambda: server.stats().running)
    until(lambda: server.stats().finished_total != aborted)


def at_night(*case: object) -> ParameterSet:
    return pytest.param(*case, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", ASKED),
        at_night("/v1/completions", {**ASKED, "stream": True}),
        at_night("/v1/completions", {**ASKED, "n": 3, "logprobs": 2, "echo": True}),
        at_night("/v1/completions", {**ASKED, "prompt": [[5] * 30, [6] * 40]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi " * 50}], "max_tokens": 3}),
        at_night("/v1/messages", {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16, "store": False}),
        at_night("/api/generate", {"model": "fake", "prompt": "hi", "stream": True, "options": {"num_predict": 3}}),
        (None, None),
    ],
)
def test_a_request_leaves_nothing_for_a_collection(path: str | None, body: dict[str, object] | None) -> None:
    """Under load some 2,500 requests had waited for one, with all their tokens: 70 MB now and then."""
    pace = None if path else lambda step: time.sleep(0.001)  # an answer that lasts until its client leaves
    with running(Fake(limits=replace(ROOMY, max_context=1024), before_run=pace)) as server:

        def ask() -> None:
            if path is None:
                leaves_early(server)
            else:
                reply = post(server.url, path, body)
                assert reply.status_code == 200, reply.text

        ask()
        with without_collections():
            before = alive()
            for _ in range(10):
                ask()
            until(lambda: alive() <= before, 3)


def test_a_loop_that_is_stepped_by_hand_leaves_nothing_either() -> None:
    loop = make_loop(limits(page_tokens=4))
    answered(loop, [1, 2, 3])
    with without_collections():
        before = alive()
        for i in range(10):
            answered(loop, [1, 2, i], replace(GREEDY, n=2))
        assert alive() <= before
