"""Ensembles of models that compute an output only where its optional input was given."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.request_validation import RawInput
from millrace.model_repository.request.status_code import StatusError
from tests.support.python_models import HEAD, OWN, loaded, write

MAYBE = (
    HEAD
    + """
    def execute(self, requests):
        answers = []
        for request in requests:
            given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            pairs = [(name, made) for name, made in (("A", "X"), ("B", "Y")) if name in given]
            outputs = [pb_utils.Tensor(made, given[name] + 1) for name, made in pairs]
            answers.append(pb_utils.InferenceResponse(outputs))
        return answers
"""
)
TENSORS = """
input [ { name: "A" data_type: TYPE_FP32 dims: [ 1 ] optional: true },
        { name: "B" data_type: TYPE_FP32 dims: [ 1 ] optional: true } ]
output [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] }, { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""


def step(model: str, inputs: str, outputs: str) -> str:
    """inputs, outputs: `A:a B:b`, the model's name of a tensor and the ensemble's"""
    maps = [f'input_map {{ key: "{k}" value: "{v}" }}' for k, v in (pair.split(":") for pair in inputs.split())]
    maps += [f'output_map {{ key: "{k}" value: "{v}" }}' for k, v in (pair.split(":") for pair in outputs.split())]
    return f'step {{ model_name: "{model}" model_version: -1 {" ".join(maps)} }}'


ONE = step("opt", "A:A B:B", "X:X Y:Y")
TWO = step("opt", "A:A B:B", "X:x Y:y") + step("opt", "A:x B:y", "X:X Y:Y")
NESTED = step("one", "A:A B:B", "X:X Y:Y")


@pytest.fixture(params=["", OWN], ids=["here", "own"])
def root(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    write(tmp_path, "opt", MAYBE, f'backend: "python" {request.param}' + TENSORS)
    for name, steps in (("one", ONE), ("two", TWO), ("nested", NESTED)):
        (tmp_path / name / "1").mkdir(parents=True)
        config = f'platform: "ensemble" {TENSORS} ensemble_scheduling {{ {steps} }}'
        (tmp_path / name / "config.pbtxt").write_text(config)
    return tmp_path


CASES = [("one", 1, ""), ("two", 2, "in ensemble 'two', "), ("nested", 1, "in ensemble 'nested', model 'one'")]


def test_what_nobody_asks_for_may_be_missing(root: Path) -> None:
    async def run() -> None:
        async with loaded(root) as repository:
            for name in ("opt", "one", "two", "nested"):
                await repository.load(name)

            async def ask(name: str, inputs: str, outputs: str) -> dict[str, float]:
                model, request = repository.get(name), InferRequest({}, tuple(outputs))
                given = [RawInput(one, "FP32", (1,), np.array([ord(one)], np.float32)) for one in inputs]
                model.checker.attach_inputs(request, given)
                return {made: float(array[0]) for made, array in (await model.infer(request)).outputs.items()}

            for name, n, where in CASES:
                a, b = ord("A") + n, ord("B") + n
                assert await ask(name, "A", "X") == {"X": a}, name
                assert await ask(name, "B", "Y") == {"Y": b}, name
                assert await ask(name, "AB", "") == {"X": a, "Y": b}, name
                for outputs in ("Y", "XY", ""):
                    with pytest.raises(StatusError) as caught:
                        await ask(name, "A", outputs)
                    assert "computed no output 'Y'" in str(caught.value) and where in str(caught.value), name

    asyncio.run(run())


NEEDED = 'backend: "identity" input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }'
NEEDED += ' output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }'


def test_a_step_that_needs_what_is_missing_says_so(root: Path) -> None:
    steps = step("opt", "A:A B:B", "X:X Y:y") + step("needs", "IN:y", "OUT:Y")
    for name, config in (
        ("needs", NEEDED),
        ("pair", f'platform: "ensemble" {TENSORS} ensemble_scheduling {{ {steps} }}'),
    ):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)

    async def run() -> None:
        async with loaded(root) as repository:
            for name in ("opt", "needs", "pair"):
                await repository.load(name)
            model = repository.get("pair")
            for outputs, words in (("X", ""), ("Y", "missing required input(s) ['IN']")):
                request = InferRequest({}, (outputs,))
                model.checker.attach_inputs(request, [RawInput("A", "FP32", (1,), np.ones(1, np.float32))])
                if not words:
                    assert (await model.infer(request)).outputs["X"].tolist() == [2]
                    continue
                with pytest.raises(StatusError) as caught:
                    await model.infer(request)
                assert words in str(caught.value)

    asyncio.run(run())
