"""`reshape` of outputs: a model makes one shape and clients see another, of a model and of an ensemble."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from millrace.model_repository.config.message_fields import empty
from millrace.model_repository.config.model_config import ModelConfig, ModelOutput, Reshape
from millrace.model_repository.repository.multi_repository import read_repositories
from millrace.model_repository.request.infer_request import InferResponse
from millrace.model_repository.request.reshape import OutputReshaper
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.request.tensors import Array
from tests.support.loaded import Loaded, infer
from tests.support.repository import write_models


def numbers(*shape: int) -> Array:
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


def reshaped(max_batch: int, made: tuple[int, ...], dims: tuple[int, ...]) -> OutputReshaper:
    said = replace(empty(ModelOutput), name="y", dims=dims, reshape=Reshape(shape=made))
    other = replace(empty(ModelOutput), name="z", dims=(4,))
    return OutputReshaper(replace(empty(ModelConfig), name="m", max_batch_size=max_batch, output=(said, other)))


@pytest.mark.parametrize(
    ("max_batch", "made", "dims", "given", "told"),
    [
        (8, (), (1,), (3,), (3, 1)), (8, (4,), (2, 2), (3, 4), (3, 2, 2)), (0, (4,), (2, 2), (4,), (2, 2)),
        (8, (4,), (2, 2), (0, 4), (0, 2, 2)), (8, (-1,), (-1, 1), (2, 5), (2, 5, 1)),
        (0, (-1, 4, 1, -1), (-1, 2, 2, -1), (3, 4, 1, 5), (3, 2, 2, 5)),
        (8, (4,), (2, 2), (3, 2, 2), (3, 2, 2)),  # as clients see it already
        (8, (-1,), (-1, 1), (3, 5, 1), (3, 5, 1)),
        (8, (4,), (2, 2), (3, 1, 4), (3, 2, 2)),  # as many elements: Triton takes them, too
    ],
)  # fmt: skip
def test_what_is_made_is_told_in_dims(
    max_batch: int, made: tuple[int, ...], dims: tuple[int, ...], given: tuple[int, ...], told: tuple[int, ...]
) -> None:
    array = numbers(*given)
    found = reshaped(max_batch, made, dims).reshape("", InferResponse({"z": array, "y": array}, {"p": 1}))
    assert found.outputs["y"].shape == told and found.outputs["y"].tobytes() == array.tobytes()
    assert found.outputs["z"] is array and list(found.outputs) == ["z", "y"] and found.parameters == {"p": 1}


def test_what_has_no_such_shape_is_the_models_fault() -> None:
    what = r"^\[request id: r\] output 'y' of model 'm' has shape \[3\], expected \[4\], to be told as \[2,2\]$"
    with pytest.raises(StatusError, match=what):
        reshaped(8, (4,), (2, 2)).reshape("[request id: r] ", InferResponse({"y": numbers(2, 3)}))
    with pytest.raises(StatusError, match=r"has shape \[5\], expected \[-1,1\], to be told as \[1,-1,1\]"):
        reshaped(0, (-1, 1), (1, -1, 1)).reshape("", InferResponse({"y": numbers(5)}))


SQUARE = "dims: [ 2, 2 ] reshape { shape: [ 4 ] }"
TENSORS = """input { name: "INPUT0" data_type: TYPE_INT32 %s }
output { name: "OUTPUT0" data_type: TYPE_INT32 %s }
"""
STEPS = """ensemble_scheduling { step { model_name: "%s" model_version: -1
input_map { key: "INPUT0" value: "INPUT0" } output_map { key: "OUTPUT0" value: "OUTPUT0" } } }
"""
MODELS = {
    "flat": 'backend: "identity" max_batch_size: 8 ' + TENSORS % ("dims: 4", "dims: 4"),
    "row": 'backend: "identity" ' + TENSORS % ("dims: 4", "dims: 4"),
    "square": 'backend: "identity" max_batch_size: 8 ' + TENSORS % (SQUARE, SQUARE),
    "widened": 'backend: "identity" max_batch_size: 8 ' + TENSORS % ("dims: 4", SQUARE),
    "through": 'platform: "ensemble" max_batch_size: 8 ' + TENSORS % (SQUARE, SQUARE) + STEPS % "flat",
    "by_a_row": 'platform: "ensemble" max_batch_size: 8 ' + TENSORS % (SQUARE, SQUARE) + STEPS % "row",
    "of_widened": 'platform: "ensemble" max_batch_size: 8 ' + TENSORS % ("dims: 4", "dims: [ 2, 2 ]")
    + STEPS % "widened",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("square", (3, 2, 2), (3, 2, 2)), ("widened", (3, 4), (3, 2, 2)), ("through", (3, 2, 2), (3, 2, 2)),
        ("by_a_row", (1, 2, 2), (1, 2, 2)), ("of_widened", (3, 4), (3, 2, 2)),
    ],
)  # fmt: skip
def test_models_and_ensembles_answer_in_dims(
    tmp_path: Path, name: str, given: tuple[int, ...], told: tuple[int, ...]
) -> None:
    write_models(tmp_path, MODELS)
    assert [p.what for model in read_repositories([tmp_path])[0].models for p in model.problems] == []

    async def run() -> None:
        async with Loaded(tmp_path, model_control_mode="explicit", load_model=(name,)) as repository:
            found = (await infer(repository, name, INPUT0=numbers(*given)))["OUTPUT0"]
            assert found.shape == told and found.tobytes() == numbers(*given).tobytes()

    asyncio.run(run())


def test_an_ensemble_is_compared_by_what_its_steps_make(tmp_path: Path) -> None:
    whole = 'platform: "ensemble" max_batch_size: 8 ' + TENSORS % (
        "dims: 4",
        "dims: [ 2, 2 ] reshape { shape: [ 2, 2 ] }",
    )
    write_models(tmp_path, {"flat": MODELS["flat"], "e": whole + STEPS % "flat"})
    (what,) = (p.what for model in read_repositories([tmp_path])[0].models for p in model.problems)
    assert "inconsistent shape: [-1,2,2] is inferred from model e while [-1,4] is inferred from model flat" in what


def test_an_output_of_no_such_shape_is_an_error_and_counted(tmp_path: Path) -> None:
    loose = 'backend: "identity" max_batch_size: 8 ' + TENSORS % ("dims: -1", SQUARE)
    write_models(tmp_path, {"m": loose})

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            with pytest.raises(StatusError, match=r"output 'OUTPUT0' of model 'm' has shape \[3\], expected \[4\]"):
                await infer(repository, "m", INPUT0=numbers(1, 3))
            assert (await infer(repository, "m", INPUT0=numbers(1, 4)))["OUTPUT0"].shape == (1, 2, 2)
            said = repository.get("m").statistics_dict()["inference_stats"]
            assert said["success"]["count"] == said["fail"]["count"] == 1

    asyncio.run(run())
