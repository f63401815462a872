"""One loaded model, without a server: its queue, its instances, its answers, and what goes wrong in it."""

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.model_repository.models.backend_model import BackendModel
from millrace.model_repository.repository.model_names import ModelId
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.request_validation import RawInput
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.scheduling.dynamic_batcher import CloseReason
from tests.support.loaded import BATCHES, Loaded, asked, becomes
from tests.support.repository import REPEAT, identity, write_models


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_models(tmp_path, {"m": BATCHES % ""})


def test_requests_that_wait_are_computed_together(root: Path) -> None:
    write_models(
        root, {"m": BATCHES % "dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 3000000 }"}
    )

    async def run() -> None:
        async with Loaded(root) as repository:
            model = repository.get("m")
            found = await asyncio.gather(*(model.infer(asked(model, i, i)) for i in range(4)))
            for i, response in enumerate(found):
                assert response.outputs["OUTPUT0"].tolist() == [[i], [i]], "each its own"
            assert model.statistics.by_size.keys() == {4} and model.statistics.n_executions == 2
            assert model.statistics.close_reasons == {CloseReason.PREFERRED: 2}
            begin = time.monotonic()
            late = asyncio.ensure_future(model.infer(asked(model, 1)))
            await asyncio.sleep(0.01)
            assert model.n_pending == 1 and not late.done()
            late.cancel()
            assert (await asyncio.gather(late, return_exceptions=True))[0].__class__ is asyncio.CancelledError
            assert model.n_pending == 0 and model.statistics.failures == {"CANCELED": 1}
            assert time.monotonic() - begin < 2

    asyncio.run(run())


def test_queues_refuse_and_time_out(root: Path) -> None:
    policy = "default_queue_policy { default_timeout_microseconds: 20000 max_queue_size: 2 }"
    slow = 'parameters { key: "execute_delay_ms" value { string_value: "60" } }'
    write_models(root, {"m": BATCHES % f"dynamic_batching {{ preferred_batch_size: [ 1 ] {policy} }} {slow}"})

    async def run() -> None:
        async with Loaded(root) as repository:
            model = repository.get("m")
            results = await asyncio.gather(*(model.infer(asked(model, i)) for i in range(4)), return_exceptions=True)
            answered, *others = results
            assert isinstance(answered, InferResponse)
            says = [(e.code, str(e)) for e in others if isinstance(e, StatusError)]
            expired = (Code.UNAVAILABLE, "Request timeout expired")
            full = (Code.UNAVAILABLE, "[request id: <id_unknown>] Exceeds maximum queue size")
            assert says == [expired, expired, full]
            assert model.statistics.failures == {"REJECTED": 3}

    asyncio.run(run())


SLEEPER = """
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        (values,) = [r.inputs()[0].as_numpy() for r in requests]
        time.sleep(float(values[0, 0]))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values)])]
"""


@pytest.mark.parametrize("ordered", [True, False])
def test_answers_come_in_order_where_that_is_asked(tmp_path: Path, ordered: bool) -> None:
    """Two instances, of which one takes long for the first request, and the other none for the rest."""
    batching = f"dynamic_batching {{ preferred_batch_size: [ 1 ] preserve_ordering: {str(ordered).lower()} }}"
    config = (BATCHES % f"{batching} instance_group {{ count: 2 }}").replace('"identity"', '"python"')
    write_models(tmp_path, {"m": config})
    (tmp_path / "m" / "1" / "model.py").write_text(SLEEPER)

    async def run() -> list[float]:
        async with Loaded(tmp_path) as repository:
            model, order = repository.get("m"), list[float]()
            asking = [asyncio.ensure_future(model.infer(asked(model, seconds))) for seconds in (0.15, 0.01, 0.02)]
            for one in asking:
                one.add_done_callback(lambda f: order.append(f.result().outputs["OUTPUT0"].item()))
            await asyncio.gather(*asking)
            await asyncio.sleep(0)
            return order

    order = [round(seconds, 2) for seconds in asyncio.run(run())]
    assert order == ([0.15, 0.01, 0.02] if ordered else [0.01, 0.02, 0.15])


def test_what_is_quick_and_small_is_computed_where_it_is_asked(root: Path) -> None:
    async def run() -> None:
        async with Loaded(root) as repository:
            model = repository.get("m")
            found = list[Any]()
            small = asked(model, 7)
            model.submit(small, lambda response, error, final: found.append((response, error, final)))
            ((response, error, final),) = found
            assert response.outputs["OUTPUT0"].tolist() == [[7]] and error is None and final, "before `submit` returned"
            assert model.statistics.n_executions == 1 and model.statistics.stages["success"].count == 1
            write_models(root, {"wide": identity("FP32", "-1")})
            await repository._changes.load(ModelId("", "wide"))
            wide = repository.get("wide")
            request, data = InferRequest({}), np.zeros(1 << 15, np.float32)
            wide.checker.attach_inputs(request, [RawInput("INPUT0", "FP32", data.shape, data)])
            answering = asyncio.ensure_future(wide.infer(request))
            await asyncio.sleep(0)
            assert not answering.done() and len((await answering).outputs["OUTPUT0"]) == 1 << 15, "in its thread"

    asyncio.run(run())


def test_a_decoupled_model_answers_as_often_as_it_likes(tmp_path: Path) -> None:
    write_models(tmp_path, {"repeat": REPEAT})

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model = repository.get("repeat")
            request = InferRequest({})
            values = np.array([4, 2, 0], np.int32)
            zeros = np.zeros(3, np.uint32)
            model.checker.attach_inputs(
                request,
                [
                    RawInput("IN", "INT32", (3,), values),
                    RawInput("DELAY", "UINT32", (3,), zeros),
                    RawInput("WAIT", "UINT32", (1,), zeros[:1]),
                ],
            )
            answers: list[tuple[int, int] | None] = []
            done = asyncio.Event()

            def receive(response: InferResponse | None, error: StatusError | None, final: bool) -> None:
                assert error is None
                out = response.outputs if response else None
                answers.append((int(out["OUT"][0]), int(out["IDX"][0])) if out else None)
                if final:
                    done.set()

            model.submit(request, receive)
            await asyncio.wait_for(done.wait(), 10)
            assert answers == [(4, 0), (2, 1), (0, 2), None]
            assert model.statistics_dict()["inference_stats"]["success"]["count"] == 1

    asyncio.run(run())


def test_a_model_that_raises_answers_with_it_and_goes_on(root: Path) -> None:
    async def run() -> None:
        async with Loaded(root) as repository:
            model = repository.get("m")
            request = asked(model, 1)
            request.outputs = ("GONE",)  # what the backend looks for, and does not find
            with pytest.raises(StatusError) as failed:
                await model.infer(request)
            assert failed.value.code is Code.INTERNAL and str(failed.value) == (
                "[request id: <id_unknown>] the model computed no output 'GONE'"
            )
            assert model.statistics.failures == {"BACKEND": 1}
            assert (await model.infer(asked(model, 5))).outputs["OUTPUT0"].tolist() == [[5]]

    asyncio.run(run())


def test_what_was_taken_is_answered_before_a_model_goes(root: Path) -> None:
    write_models(root, {"m": BATCHES % 'parameters { key: "execute_delay_ms" value { string_value: "40" } }'})

    async def run() -> None:
        async with Loaded(root) as repository:
            model = repository.get("m")
            asking = [asyncio.ensure_future(model.infer(asked(model, i))) for i in range(3)]
            await asyncio.sleep(0)
            await model.retire()
            assert [a.result().outputs["OUTPUT0"].item() for a in asking] == [0, 1, 2]

    asyncio.run(run())


def test_a_request_that_was_read_while_its_model_was_unloaded_is_refused(root: Path) -> None:
    async def run() -> None:
        async with Loaded(root, model_control_mode="explicit", load_model=("m",)) as repository:
            model = repository.get("m")
            assert isinstance(model, BackendModel)
            late = asked(model, 1)
            await repository.unload("m")
            await becomes(lambda: all(worker.closed.done() for worker in model._workers))
            with pytest.raises(StatusError) as refused:
                await model.infer(late)
            assert refused.value.code is Code.UNAVAILABLE
            assert str(refused.value) == "Request for unknown model: 'm' version 1 is not at ready state"
            assert model.statistics.failures == {"REJECTED": 1} and model.n_pending == 0

    asyncio.run(run())


def test_an_instance_that_is_stuck_is_told_of(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("millrace.model_repository.models.backend_model.STUCK_WARNING_S", 0.02)
    write_models(root, {"m": BATCHES % 'parameters { key: "execute_delay_ms" value { string_value: "300" } }'})

    async def run() -> None:
        async with Loaded(root) as repository:
            model = repository.get("m")
            assert isinstance(model, BackendModel)
            assert model._watch is None
            asking = asyncio.ensure_future(model.infer(asked(model, 1)))
            await becomes(lambda: "m version 1: m_0 computes one batch for 0." in caplog.text)
            assert not asking.done()
            assert (await asking).outputs["OUTPUT0"].item() == 1
            await becomes(lambda: model._watch is None)
            assert all(worker.busy_since_s is None for worker in model._workers)

    asyncio.run(run())


def test_closing_ends_whoever_waits(root: Path) -> None:
    write_models(root, {"m": BATCHES % 'parameters { key: "execute_delay_ms" value { string_value: "60" } }'})

    async def run() -> list[object]:
        async with Loaded(root) as repository:
            model = repository.get("m")
            asking = [asyncio.ensure_future(model.infer(asked(model, i))) for i in range(3)]
            await asyncio.sleep(0.01)
        return await asyncio.gather(*asking, return_exceptions=True)

    first, *others = asyncio.run(run())
    assert isinstance(first, InferResponse), "what is being computed is answered"
    assert [str(e) for e in others] == ["Server is stopping"] * 2


def test_who_asks_for_what_is_not_there_fails_alone(root: Path) -> None:
    slow = 'parameters { key: "execute_delay_ms" value { string_value: "20" } }'
    write_models(root, {"m": BATCHES % f"dynamic_batching {{ preferred_batch_size: [ 3 ] }} {slow}"})

    async def run() -> list[object]:
        async with Loaded(root) as repository:
            model = repository.get("m")
            requests = [asked(model, i) for i in range(4)]
            requests[1].outputs = ("GONE",)
            found = await asyncio.gather(*(model.infer(r) for r in requests), return_exceptions=True)
            assert 3 in model.statistics.by_size, "they were computed together"
            return [str(r) if isinstance(r, StatusError) else r.outputs["OUTPUT0"].item() for r in found]  # type: ignore[union-attr]

    assert asyncio.run(run()) == [0, "[request id: <id_unknown>] the model computed no output 'GONE'", 2, 3]


def test_many_that_go_away_cost_no_look_at_the_others(root: Path) -> None:
    """A walk through the queue for each would take half a minute."""
    write_models(root, {"m": BATCHES % 'parameters { key: "execute_delay_ms" value { string_value: "200" } }'})

    async def run() -> None:
        async with Loaded(root, max_model_requests=30_000) as repository:
            model, ended = repository.get("m"), list[object]()
            first = asyncio.ensure_future(model.infer(asked(model, 7)))
            await asyncio.sleep(0)
            requests = [asked(model, 1) for _ in range(20_000)]
            for request in requests:
                model.submit(request, lambda response, error, final: ended.append(error))
            assert model.n_pending == len(requests)
            begin_s = time.process_time()
            for request in reversed(requests):
                model.cancel(request)
            assert time.process_time() - begin_s < 3
            assert model.n_pending == 0 and len(ended) == len(requests)
            assert (await first).outputs["OUTPUT0"].item() == 7

    asyncio.run(run())
