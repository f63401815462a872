"""Requests that a model sends back to be executed again: iterative sequences."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.status_code import StatusError
from tests.support.python_models import HEAD, asked, loaded, write
from tests.support.triton_models import DECOUPLED, GENERATES, ITERATIVE, RESCHEDULED, SQUARE_CONFIG


def number(n: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
    return np.array([n], np.int32)


def test_a_request_is_executed_until_it_is_answered(tmp_path: Path) -> None:
    write(tmp_path, "m", RESCHEDULED, SQUARE_CONFIG % (ITERATIVE % ""))

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model = repository.get("m")
            requests = [asked(model, IN=number(n)) for n in (0, 3, 1)]
            requests[2].correlation_id = 7
            found = await asyncio.gather(*(model.infer(r) for r in requests))
            assert [r.outputs["OUT"].tolist() for r in found] == [[1010], [4010], [2010]], "START, then no flags"
            assert requests[0].correlation_id != requests[1].correlation_id and requests[2].correlation_id == 7
            assert (model.statistics.n_inferences, model.statistics.n_executions, model.n_pending) == (3, 7, 0)

    asyncio.run(run())


@pytest.mark.parametrize(("more", "most"), [("", 1), ("oldest { max_candidate_sequences: 2 }", 2)])
def test_sequences_hold_slots_and_others_wait(tmp_path: Path, more: str, most: int) -> None:
    write(tmp_path, "m", GENERATES, SQUARE_CONFIG % (ITERATIVE % more + DECOUPLED))

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model, order, done = repository.get("m"), list[tuple[str, int]](), asyncio.Event()
            began: list[str] = []
            ended: list[str] = []

            def ask(name: str, n: int) -> InferRequest:
                def receive(response: Any, error: StatusError | None, final: bool) -> None:
                    assert error is None, error
                    order.append((name, int(response.outputs["OUT"][0])))
                    if order[-1][1] == 1:
                        began.append(name)
                    if final:
                        ended.append(name)
                    assert len(began) - len(ended) <= most
                    if len(ended) == 4:
                        done.set()

                request = asked(model, IN=number(n))
                model.submit(request, receive)
                return request

            ask("a", 3), ask("b", 2)
            gone = asked(model, IN=number(5))
            model.submit(gone, lambda *_: None)
            ask("c", 1), ask("d", 4)
            model.cancel(gone)
            await asyncio.wait_for(done.wait(), 5)
            assert {name: [n for who, n in order if who == name] for name in "abcd"} == {
                "a": [1, 2, 3], "b": [1, 2], "c": [1], "d": [1, 2, 3, 4],
            }  # fmt: skip
            assert began == ["a", "b", "c", "d"] and model.n_pending == 0 and gone.finished

    asyncio.run(run())


def test_a_cancelled_request_is_not_executed_again(tmp_path: Path) -> None:
    code = "    def execute(self, requests):\n        requests[0].set_release_flags(2)\n        return [None]\n"
    write(tmp_path, "m", HEAD + code, SQUARE_CONFIG % (ITERATIVE % ""))

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model = repository.get("m")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(model.infer(asked(model, IN=number(1))), 0.1)
            await asyncio.wait_for(model.retire(), 5)
            assert model.statistics.failures["CANCELED"] == 1

    asyncio.run(run())


AGAIN = "requests[0].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE); "
WRONG = [
    (ITERATIVE % "", AGAIN + "return [pb_utils.InferenceResponse([])]",
     "Expected a None object in the execute function return list for reschduled request, found type"),
    ("", AGAIN + "return [None]", "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE"),
    ("dynamic_batching { } max_batch_size: 2", AGAIN + "return None",
     "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE"),
    (ITERATIVE % "", AGAIN + "raise ValueError('mine')", "message: ValueError: mine"),
    (ITERATIVE % "", "requests[0].set_release_flags(3)", "request release flags 3: expected ALL (1) or RESCHEDULE (2)"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "body", "says"), WRONG)
def test_what_is_wrong_in_rescheduling(tmp_path: Path, more: str, body: str, says: str) -> None:
    write(tmp_path, "m", HEAD + f"    def execute(self, requests):\n        {body}\n", SQUARE_CONFIG % more)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model = repository.get("m")
            value = number(1)[None] if "max_batch_size" in more else number(1)
            with pytest.raises(StatusError) as failed:
                await asyncio.wait_for(model.infer(asked(model, IN=value)), 5)
            assert says in str(failed.value)

    asyncio.run(run())


NOT_YET = [
    (ITERATIVE % "oldest { preserve_ordering: true }", "preserve_ordering is not supported yet"),
    (ITERATIVE % "direct { minimum_slot_utilization: 0.5 }", "minimum_slot_utilization is not supported yet"),
    (ITERATIVE % "" + "instance_group { kind: KIND_CPU count: 2 }", "iterative_sequence with 2 instances"),
]


@pytest.mark.parametrize(("more", "says"), NOT_YET)
def test_sequences_that_are_not_served_yet_are_refused(tmp_path: Path, more: str, says: str) -> None:
    write(tmp_path, "m", GENERATES, SQUARE_CONFIG % more)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            with pytest.raises(StatusError, match=says):
                await repository.load("m")

    asyncio.run(run())
