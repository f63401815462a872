"""A model of sequences in an event loop: what it is told, in which order, and how sequences end early."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from millrace.model_repository.models.model_version import Model
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.scheduling.dynamic_batcher import CloseReason
from tests.support.loaded import Loaded, becomes
from tests.support.python_models import write
from tests.support.sequences import SUMS, accumulator, part

START, END = 1, 2
DIRECT, OLDEST = "direct {}", "oldest { max_candidate_sequences: 3 preferred_batch_size: [ 1 ] }"


async def sums(model: Model, id_: int | str, *values: int, ends: bool = True) -> list[int]:
    """What a client gets that sends the next when the last is answered."""
    found = []
    for i, value in enumerate(values):
        flags = (START if i == 0 else 0) | (END if ends and i == len(values) - 1 else 0)
        response = await model.infer(part(model, id_, value, flags))
        found.append(int(response.outputs["OUTPUT"].item()))
    return found


def told(root: Path, instance: int = 0) -> list[Any]:
    """Of each batch, of each place: CORRID, INPUT, START, END, READY."""
    logs = sorted((root / "m").glob("*.log"))
    return [json.loads(line) for line in logs[instance].read_text().splitlines()]


@pytest.mark.parametrize("strategy", [DIRECT, OLDEST])
@pytest.mark.parametrize(("corrid", "ids"), [("UINT64", [2**64 - 1, 7, 3, 4, 5]), ("STRING", ["a", "é", "b", "7", 8])])
def test_sequences_side_by_side(tmp_path: Path, strategy: str, corrid: str, ids: list[int | str]) -> None:
    """More of them than there are slots."""
    write(tmp_path, "m", SUMS, accumulator(strategy, corrid, size=3))

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model = repository.get("m")
            found = await asyncio.gather(*(sums(model, id_, 1, 10, 100) for id_ in ids))
            assert found == [[1, 11, 111]] * len(ids)
            assert model.statistics.n_inferences == 3 * len(ids) and model.n_pending == 0
            assert model.statistics.stages["success"].count == 3 * len(ids)

    asyncio.run(run())
    parts = [place for batch in told(tmp_path) for place in batch if place[4]]
    for id_ in ids:
        as_told = str(id_) if corrid == "STRING" else id_
        assert [p[1:4] for p in parts if p[0] == as_told][-3:] == [[1, 1, 0], [10, 0, 0], [100, 0, 1]]


def test_all_at_once_are_answered_in_their_order(tmp_path: Path) -> None:
    write(tmp_path, "m", SUMS, accumulator(OLDEST, more="instance_group { count: 2 }"))

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model = repository.get("m")
            flags = [START, *[0] * 18, END]
            asking = [model.infer(part(model, id_, 1, flag)) for flag in flags for id_ in (1, 2, 3)]
            found = [int(r.outputs["OUTPUT"].item()) for r in await asyncio.gather(*asking)]
            assert found == [i for i in range(1, 21) for _ in range(3)]

    asyncio.run(run())
    assert told(tmp_path, 0) and told(tmp_path, 1), "both instances had some"


def test_an_empty_slot_is_told_that_it_is_not_ready(tmp_path: Path) -> None:
    write(
        tmp_path,
        "m",
        SUMS,
        accumulator("direct { max_queue_delay_microseconds: 30000 minimum_slot_utilization: 1 }", size=2),
    )

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model = repository.get("m")
            await asyncio.gather(sums(model, 8, 5, ends=False), sums(model, 9, 6, ends=False))
            last = await model.infer(part(model, 9, 7, END))
            assert last.outputs["OUTPUT"].tolist() == [[13]]
            assert model.statistics.by_size.keys() == {2} and model.statistics.n_inferences == 3
            assert model.statistics.close_reasons == {CloseReason.FULL: 1, CloseReason.DELAY: 1}

    asyncio.run(run())
    assert told(tmp_path) == [[[8, 5, 1, 0, True], [9, 6, 1, 0, True]], [[0, 0, 0, 0, False], [9, 7, 0, 1, True]]]


def refused(error: object) -> tuple[Code, str]:
    assert isinstance(error, StatusError), error
    return error.code, str(error)


def test_what_is_refused_and_what_an_error_leaves(tmp_path: Path) -> None:
    write(tmp_path, "m", SUMS, accumulator(DIRECT, "INT32"))

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model = repository.get("m")

            async def asked(*how: Any, **more: Any) -> tuple[Code, str]:
                return refused(
                    (await asyncio.gather(model.infer(part(model, *how, **more)), return_exceptions=True))[0]
                )

            first = "must specify the START flag on the first request of the sequence"
            assert await asked(3, 1) == (Code.INVALID_ARG, f"inference request for sequence 3 to model 'm' {first}")
            assert await asked("x", 1, START) == (
                Code.INVALID_ARG, "sequence id 'x' is a string, and control input 'CORRID' is TYPE_INT32"
            )  # fmt: skip
            too_large = f"sequence id {2**31} does not fit into control input 'CORRID' of TYPE_INT32"
            assert await asked(2**31, 1, START) == (Code.INVALID_ARG, too_large)
            assert model.statistics.failures == {"REJECTED": 3}
            assert await sums(model, 3, 5, 6, ends=False) == [5, 11]
            assert await asked(3, -1) == (Code.INTERNAL, "less than nothing")
            assert (await model.infer(part(model, 3, 1, END))).outputs["OUTPUT"].item() == 11, "it goes on"
            assert await asked(3, 1) == (Code.INVALID_ARG, f"inference request for sequence 3 to model 'm' {first}")

    asyncio.run(run())


def test_a_sequence_that_is_idle_for_too_long_ends(tmp_path: Path) -> None:
    write(
        tmp_path, "m", SUMS, accumulator(size=0, idle_us=50_000).replace("[[self.sums[corrid]]]", "[self.sums[corrid]]")
    )

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model = repository.get("m")
            assert await sums(model, 1, 1, ends=False) == [1]
            assert await sums(model, 2, 1) == [1], "it has waited for the slot of the first"
            error = (await asyncio.gather(model.infer(part(model, 1, 1)), return_exceptions=True))[0]
            assert "for sequence 1 to model 'm' must specify the START flag" in refused(error)[1]

    asyncio.run(run())


def test_the_backlog_has_time_outs_and_is_cancelled(tmp_path: Path) -> None:
    write(tmp_path, "m", SUMS, accumulator(size=1))

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model = repository.get("m")
            assert await sums(model, 1, 1, ends=False) == [1]
            late = asyncio.gather(
                model.infer(part(model, 2, 1, START, timeout_us=30_000)), model.infer(part(model, 2, 1)),
                return_exceptions=True,
            )  # fmt: skip
            waiting = [asyncio.ensure_future(model.infer(part(model, 3, i, START if not i else 0))) for i in range(3)]
            expired = (Code.UNAVAILABLE, "timeout of the corresponding sequence has been expired")
            assert [refused(e) for e in await late] == [expired] * 2
            waiting[1].cancel()
            error = (await asyncio.gather(waiting[2], return_exceptions=True))[0]
            cancelled = (Code.CANCELLED, "[request id: <id_unknown>] request was cancelled")
            assert refused(error) == cancelled, "what stands behind it, too"
            assert model.n_pending == 1 and not waiting[0].done()
            assert (await model.infer(part(model, 1, 1, END))).outputs["OUTPUT"].item() == 2
            assert (await waiting[0]).outputs["OUTPUT"].item() == 0, "what stands before it is computed"
            assert model.statistics.failures == {"REJECTED": 2, "CANCELED": 2}
            assert await sums(model, 3, 4) == [4]

    asyncio.run(run())


def test_a_sequence_that_begins_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "m", SUMS, accumulator())

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model = repository.get("m")
            with caplog.at_level(logging.WARNING):
                caplog.clear()  # of its loading, where another test has set the log's level
                assert await sums(model, 1, 1, 2, ends=False) == [1, 3]
                assert not caplog.messages
                assert await sums(model, 1, 10, 20) == [10, 30]
            assert caplog.messages == ["m: sequence 1 begins again before it has ended"]

    asyncio.run(run())


def test_unloading_answers_what_was_taken_and_waits_for_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, "m", SUMS, accumulator(size=1, idle_us=3_600_000_000))

    async def run() -> None:
        async with Loaded(tmp_path, model_control_mode="explicit", load_model=("m",)) as repository:
            model = repository.get("m")
            assert await sums(model, 1, 1, ends=False) == [1]
            backlog = [asyncio.ensure_future(model.infer(part(model, id_, id_, START))) for id_ in (2, 3)]
            await asyncio.sleep(0.02)
            assert model.n_pending == 2, "the first has the only slot for an hour"
            await repository.unload("m")
            assert [(await one).outputs["OUTPUT"].item() for one in backlog] == [2, 3]
            await becomes(lambda: not repository.is_ready() or not repository._changes.tasks)
            with pytest.raises(StatusError, match="is not at ready state"):
                await model.infer(part(model, 1, 1))

    asyncio.run(run())


def test_stopping_ends_what_waits(tmp_path: Path) -> None:
    write(tmp_path, "m", SUMS, accumulator(size=1))

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model = repository.get("m")
            assert await sums(model, 1, 1, ends=False) == [1]
            waiting = asyncio.ensure_future(model.infer(part(model, 2, 1, START)))
            await asyncio.sleep(0.02)
        assert refused((await asyncio.gather(waiting, return_exceptions=True))[0])[1] == "Server is stopping"

    asyncio.run(run())


LATE = """
import threading, time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            threading.Thread(target=self.answer, args=(request.get_response_sender(), value), daemon=True).start()

    def answer(self, sender, value):
        time.sleep(0.03 if value[0, 0] == 1 else 0)
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", value)]), flags=1)
"""


def test_the_next_waits_for_an_answer_that_comes_late(tmp_path: Path) -> None:
    write(tmp_path, "m", LATE, accumulator())

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model, order = repository.get("m"), list[int]()
            asking = [
                asyncio.ensure_future(model.infer(part(model, 1, i + 1, START if not i else 0))) for i in range(3)
            ]
            for one in asking:
                one.add_done_callback(lambda f: order.append(f.result().outputs["OUTPUT"].item()))
            await asyncio.gather(*asking)
            await asyncio.sleep(0)
            assert order == [1, 2, 3] and model.statistics.n_executions == 3

    asyncio.run(run())


DECOUPLED = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.first = None

    def execute(self, requests):
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", value)]))
            if self.first is None:
                self.first = sender
            else:  # the one before ends only after this
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                self.first.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def test_the_next_of_a_decoupled_model_waits_for_no_answer(tmp_path: Path) -> None:
    write(tmp_path, "m", DECOUPLED, accumulator(more="model_transaction_policy { decoupled: true }"))

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model, found = repository.get("m"), list[Any]()
            done = asyncio.Event()

            def receive(response: Any, error: StatusError | None, final: bool) -> None:
                assert error is None
                found.append(int(response.outputs["OUTPUT"].item()) if response is not None else "end" * final)
                if found.count("end") == 2:  # True would be counted where 1 is
                    done.set()

            for value, flags in ((1, START), (2, END)):
                model.submit(part(model, 1, value, flags), receive)
            async with asyncio.timeout(10):
                await done.wait()
            assert found == [1, 2, "end", "end"]

    asyncio.run(run())


@pytest.mark.parametrize("ordered", [True, False])
def test_answers_of_oldest_come_in_order_where_that_is_asked(tmp_path: Path, ordered: bool) -> None:
    """Two sequences, of which the first takes long to be answered."""
    strategy = f"oldest {{ preferred_batch_size: [ 1 ] preserve_ordering: {str(ordered).lower()} }}"
    write(tmp_path, "m", LATE, accumulator(strategy))

    async def run() -> list[int]:
        async with Loaded(tmp_path) as repository:
            model, order = repository.get("m"), list[int]()
            asking = [asyncio.ensure_future(model.infer(part(model, i, i, START | END))) for i in (1, 2, 3)]
            for one in asking:
                one.add_done_callback(lambda f: order.append(f.result().outputs["OUTPUT"].item()))
            await asyncio.gather(*asking)
            await asyncio.sleep(0)
            return order

    order = asyncio.run(run())
    assert order == [1, 2, 3] if ordered else order[-1] == 1


def test_a_sequence_through_an_ensemble(tmp_path: Path) -> None:
    write(tmp_path, "m", SUMS, accumulator())
    (tmp_path / "e" / "1").mkdir(parents=True)
    (tmp_path / "e" / "config.pbtxt").write_text(
        """platform: "ensemble" max_batch_size: 4
        input { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] }
        output { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] }
        ensemble_scheduling { step { model_name: "m" model_version: -1
          input_map { key: "INPUT" value: "INPUT" } output_map { key: "OUTPUT" value: "OUTPUT" } } }"""
    )

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model = repository.get("e")
            assert await sums(model, 5, 1, 2, 3) == [1, 3, 6]
            error = (await asyncio.gather(model.infer(part(model, 5, 1)), return_exceptions=True))[0]
            assert refused(error)[1].startswith("in ensemble 'e', inference request for sequence 5 to model 'm' must")

    asyncio.run(run())
