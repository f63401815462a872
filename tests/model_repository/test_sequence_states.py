"""The implicit state of sequences: held between their requests, begun anew with each, told to who asks."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from millrace.model_repository.backends.backend import BatchedInstance
from millrace.model_repository.models.model_version import Model
from millrace.model_repository.request.status_code import Code, StatusError
from tests.support.loaded import Loaded
from tests.support.python_models import write
from tests.support.sequences import HELD_SUMS, holder, part

START, END = 1, 2
DIRECT, OLDEST = "direct {}", "oldest { max_candidate_sequences: 3 preferred_batch_size: [ 1 ] }"
ONE = 'initial_state { name: "first" data_type: TYPE_INT32 dims: [ 1 ] %s }'


async def sums(model: Model, id_: int, *values: int) -> list[int]:
    found = []
    for i, value in enumerate(values):
        flags = (START if i == 0 else 0) | (END if i == len(values) - 1 else 0)
        response = await model.infer(part(model, id_, value, flags))
        assert response.outputs.keys() == {"OUTPUT"}, "a state that is no output is told to nobody"
        found.append(int(response.outputs["OUTPUT"].item()))
    return found


@pytest.mark.parametrize("strategy", [DIRECT, OLDEST])
def test_each_sequence_has_its_own(tmp_path: Path, strategy: str) -> None:
    write(tmp_path, "m", HELD_SUMS, holder(strategy))

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model = repository.get("m")
            found = await asyncio.gather(*(sums(model, id_, id_, 10, 100) for id_ in range(1, 9)))
            assert found == [[i, i + 10, i + 110] for i in range(1, 9)]
            assert await sums(model, 1, 5) == [5], "begun anew"

    asyncio.run(run())


@pytest.mark.parametrize(("said", "first"), [("zero_data: true", 0), ('data_file: "seven"', 7)])
def test_the_first_state(tmp_path: Path, said: str, first: int) -> None:
    write(tmp_path, "m", HELD_SUMS, holder(initial=ONE % said))
    (tmp_path / "m" / "initial_state").mkdir()
    (tmp_path / "m" / "initial_state" / "seven").write_bytes(np.array([7, 9], "<i4").tobytes())

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            assert await sums(repository.get("m"), 3, 1, 2) == [first + 1, first + 3]

    asyncio.run(run())


def test_a_state_that_is_an_output_is_told_to_who_asks(tmp_path: Path) -> None:
    write(tmp_path, "m", HELD_SUMS, holder(told=True))

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model = repository.get("m")
            for asked, told in ((("OUTPUT",), {"OUTPUT"}), (("OUTPUT_STATE",), {"OUTPUT_STATE"}),
                                ((), {"OUTPUT", "OUTPUT_STATE"})):  # fmt: skip
                request = part(model, 1, 1, START, outputs=asked)
                assert (await model.infer(request)).outputs.keys() == told and request.outputs == asked
                assert (await model.infer(part(model, 1, 1))).outputs["OUTPUT"].item() == 2

    asyncio.run(run())


def test_what_is_no_state_is_an_error_and_the_one_before_it_stays(tmp_path: Path) -> None:
    write(tmp_path, "m", HELD_SUMS, holder())

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model = repository.get("m")
            assert (await model.infer(part(model, 1, 40, START))).outputs["OUTPUT"].item() == 40
            named = "[request id: <id_unknown>] "
            for value, words in (
                (-1, "less than nothing"),
                (-2, f"{named}state 'OUTPUT_STATE' has shape [1,1] of int64, expected [1,1] of INT32"),
                (-3, f"{named}the model computed no state 'OUTPUT_STATE'"),
            ):
                with pytest.raises(StatusError) as failed:
                    await model.infer(part(model, 1, value))
                assert (failed.value.code, str(failed.value)) == (Code.INTERNAL, words)
            assert (await model.infer(part(model, 1, 2))).outputs["OUTPUT"].item() == 42
            assert model.statistics.failures == {"BACKEND": 3}

    asyncio.run(run())


# What was said of each sequence, one behind the other: its state grows.
GROWS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        shapes = {pb_utils.get_input_tensor_by_name(r, "INPUT_STATE").shape() for r in requests}
        assert len({tuple(shape) for shape in shapes}) == 1, shapes
        for request in requests:
            value, state = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT", "INPUT_STATE")
            )
            state = np.concatenate([state, value], axis=1)
            out = pb_utils.Tensor("OUTPUT", state.sum(axis=1, keepdims=True, dtype=np.int32))
            answers.append(pb_utils.InferenceResponse([out, pb_utils.Tensor("OUTPUT_STATE", state)]))
        return answers
"""


@pytest.mark.parametrize("strategy", ["direct {}", "oldest { max_queue_delay_microseconds: 1000 }"])
def test_states_of_other_shapes_are_in_other_batches(tmp_path: Path, strategy: str) -> None:
    write(tmp_path, "m", GROWS.replace("shape() for", "as_numpy().shape for"), holder(strategy, dims="-1"))

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model = repository.get("m")
            await sums(model, 1, 1, 2)
            lengths = (5, 9, 2, 5)
            found = await asyncio.gather(*(sums(model, i + 1, *range(1, n + 1)) for i, n in enumerate(lengths)))
            assert [one[-1] for one in found] == [n * (n + 1) // 2 for n in lengths]

    asyncio.run(run())


def test_arrays_of_a_batch_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that takes arrays has controls and states in them like any input, and slots of zeros where none is."""
    from millrace.model_repository.backends import identity

    seen: list[dict[str, list[list[int]]]] = []

    class Sums(BatchedInstance):
        def compute(self, inputs):  # type: ignore[no-untyped-def]
            seen.append({name: array.tolist() for name, array in inputs.items()})
            total = inputs["INPUT"] + inputs["INPUT_STATE"]
            return {"OUTPUT": total, "OUTPUT_STATE": total}

    monkeypatch.setattr(identity, "_Identity", Sums)
    ready = 'control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } }'
    config = holder(f"direct {{ minimum_slot_utilization: 1 max_queue_delay_microseconds: 20000 }} {ready}")
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(config.replace('"python"', '"identity"'))

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model = repository.get("m")
            await asyncio.gather(*(model.infer(part(model, i, i, START)) for i in (1, 2, 3, 4)))
            last = await asyncio.gather(*(model.infer(part(model, i, 10)) for i in (2, 4)))
            assert [one.outputs["OUTPUT"].item() for one in last] == [12, 14]

    asyncio.run(run())
    assert seen == [
        {"INPUT": [[1], [2], [3], [4]], "READY": [[1]] * 4, "INPUT_STATE": [[0]] * 4},
        {"INPUT": [[0], [10], [0], [10]], "READY": [[0], [1], [0], [1]], "INPUT_STATE": [[0], [2], [0], [4]]},
    ]
