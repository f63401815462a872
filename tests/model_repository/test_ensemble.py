"""Ensembles: what they compute, how they end, and what of others they hold on to."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings

from millrace.model_repository.lifecycle.lifecycle import ModelRepository
from millrace.model_repository.models.model_version import Model
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.response_stream import ResponseStream
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.request.tensors import Array
from tests.support.drawn import SEEDS, examples
from tests.support.ensembles import Link, asking, ensemble
from tests.support.loaded import Loaded, becomes
from tests.support.repository import REPEAT, identity, write_models

SUMS = """backend: "add_sub" max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 4 ] }, { name: "INPUT1" data_type: TYPE_INT32 dims: [ 4 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 4 ] }, { name: "OUTPUT1" data_type: TYPE_INT32 dims: [ 4 ] } ]
"""
MUCH = 1 << 30  # more than any sum of what is drawn
BEHIND = f"""
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            a, b = (pb_utils.get_input_tensor_by_name(request, f"INPUT{{i}}").as_numpy() for i in (0, 1))
            if (a == {MUCH}).any():
                raise ValueError("too much")
            sums = [pb_utils.Tensor("OUTPUT0", a + b), pb_utils.Tensor("OUTPUT1", a - b)]
            wanted = request.requested_output_names()
            answers.append(pb_utils.InferenceResponse([t for t in sums if t.name() in wanted]))
        return answers
"""
SAME = identity("INT32", "4", "max_batch_size: 8")
SLOW = SAME + 'parameters { key: "execute_delay_ms" value { string_value: "%d" } }'
IN, OUT = {"INPUT0": "a"}, {"OUTPUT0": "b"}
SIDES = {"INPUT0": "OUTPUT0", "INPUT1": "OUTPUT1"}
BOTH = {name: name for name in SIDES}, {name: name for name in SIDES.values()}


def write(root: Path, models: Mapping[str, str]) -> Path:
    write_models(root, models)
    for name, config in models.items():
        if '"python"' in config:
            (root / name / "1" / "model.py").write_text(BEHIND)
    return root


def row(*values: int) -> Array:
    return np.array(values, np.int32).reshape(-1, 1).repeat(4, axis=1)


def drawn(draw: random.Random) -> tuple[list[str], list[str], list[Link]]:
    """Inputs, outputs and steps, in any order; each step adds and subtracts two tensors that are there before it."""
    there = inputs = [f"i{k}" for k in range(draw.randint(1, 3))]
    steps: list[Link] = []
    for k in range(draw.randint(1, 12)):
        unread = [t for t in inputs if not any(t in takes.values() for _, takes, _ in steps)]
        takes = {"INPUT0": unread[0] if unread else draw.choice(there), "INPUT1": draw.choice(there)}
        names = draw.choice([["OUTPUT0"], ["OUTPUT1"], ["OUTPUT0", "OUTPUT1"]])
        makes = {name: f"t{k}_{name[-1]}" for name in names}
        steps.append((draw.choice(["quick", "behind", "nested"]), takes, makes))
        there = [*there, *makes.values()]
    read = {t for _, takes, _ in steps for t in takes.values()}
    inputs = [t for t in inputs if t in read]
    made = [t for _, _, makes in steps for t in makes.values()]
    outputs = [t for t in made if t not in read or draw.random() < 0.3]
    draw.shuffle(steps)
    return inputs, outputs, steps


def computed(steps: Sequence[Link], tensors: Mapping[str, Array], wanted: str) -> Array:
    """Backwards from what is wanted, which the ensemble does not do."""
    if wanted in tensors:
        return tensors[wanted]
    _, takes, makes = next(step for step in steps if wanted in step[2].values())
    a, b = (computed(steps, tensors, takes[name]) for name in ("INPUT0", "INPUT1"))
    return np.asarray(a + b if makes.get("OUTPUT0") == wanted else a - b)


@settings(max_examples=examples(1))
@given(SEEDS)
def test_random_ensembles_agree_with_plain_evaluation(seed: int) -> None:
    draw, numbers = random.Random(seed), np.random.default_rng(seed)
    asked = {f"e{k}": drawn(draw) for k in range(40)}
    folder = TemporaryDirectory()
    write(
        Path(folder.name),
        {"quick": SUMS, "behind": SUMS.replace("add_sub", "python") + "dynamic_batching {}"}
        | {"nested": ensemble(list(SIDES), list(SIDES.values()), [("behind", *BOTH)])}
        | {name: ensemble(*parts) for name, parts in asked.items()},
    )

    async def check(repository: ModelRepository, name: str) -> None:
        inputs, outputs, steps = asked[name]
        model = repository.get(name)
        given = {t: numbers.integers(100, 1000, (2, 4), np.int32) for t in inputs}
        some = draw.sample(outputs, draw.randint(1, len(outputs)))
        for wanted in ((), some):
            found = (await model.infer(asking(model, wanted, **given))).outputs
            assert list(found) == list(wanted or outputs), name
            for tensor, array in found.items():
                np.testing.assert_array_equal(array, computed(steps, given, tensor), err_msg=f"{name} {tensor}")
        assert (model.statistics.n_inferences, model.statistics.stages["success"].count) == (4, 2)

    async def run() -> None:
        async with Loaded(Path(folder.name)) as repository:
            await asyncio.gather(*(check(repository, name) for name in asked))
            n_open = [m._n_open + m._n_pins for m in repository.models()]
            assert not any(n_open), "nobody is held on to"

    with folder:
        asyncio.run(run())


def test_a_long_chain_of_quick_models_is_no_recursion(tmp_path: Path) -> None:
    links = [("same", {"INPUT0": f"t{k}"}, {"OUTPUT0": f"t{k + 1}"}) for k in range(1500)]
    write(tmp_path, {"same": SAME, "chain": ensemble(["t0"], ["t1500"], links)})

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model = repository.get("chain")
            assert (await model.infer(asking(model, t0=row(7)))).outputs["t1500"].tolist() == [[7] * 4]

    asyncio.run(run())


PAIR = [
    ("behind", {"INPUT0": "a", "INPUT1": "a"}, {"OUTPUT0": "b"}),
    ("slow", {"INPUT0": "a"}, {"OUTPUT0": "c"}),
    ("quick", {"INPUT0": "b", "INPUT1": "c"}, {"OUTPUT0": "d"}),
]


def test_the_first_error_wins_and_what_runs_is_cancelled(tmp_path: Path) -> None:
    models = {"quick": SUMS, "behind": SUMS.replace("add_sub", "python"), "slow": SLOW % 300}
    write(tmp_path, models | {"pair": ensemble(["a"], ["d"], PAIR)})

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model, slow = repository.get("pair"), repository.get("slow")
            assert (await model.infer(asking(model, a=row(1)))).outputs["d"].tolist() == [[3] * 4]
            first = asyncio.ensure_future(slow.infer(asking(slow, INPUT0=row(0))))
            await becomes(lambda: slow._n_open == 1)
            with pytest.raises(StatusError) as failed:
                await model.infer(asking(model, a=row(MUCH)))
            assert failed.value.code is Code.INTERNAL and "in ensemble 'pair', " in str(failed.value)
            assert "too much" in str(failed.value)
            assert not first.done() and slow._n_open == 1, "the other step had not begun, and never does"
            assert slow.statistics.failures == {"CANCELED": 1} and model.statistics.failures == {"BACKEND": 1}
            waits = asyncio.ensure_future(model.infer(asking(model, a=row(2))))
            await becomes(lambda: slow.n_pending == 1)
            waits.cancel()
            await asyncio.gather(waits, return_exceptions=True)
            assert slow.n_pending == 0 and model.statistics.failures == {"BACKEND": 1, "CANCELED": 1}
            await first
            quick = repository.get("quick")
            assert quick.statistics.n_inferences == 1, "nothing went on"
            last = asyncio.ensure_future(model.infer(asking(model, a=row(2))))
            await becomes(lambda: slow._n_open == 1)
        with pytest.raises(StatusError, match="Server is stopping"):
            await last

    asyncio.run(run())


SPOILER = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            values = request.inputs()[0].as_numpy()
            values += 1
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values)]))
        return answers
"""


def test_a_model_that_writes_into_its_inputs_changes_nobody_elses(tmp_path: Path) -> None:
    links = [("spoiler", {"INPUT0": "b"}, {"OUTPUT0": tensor}) for tensor in ("c", "d")]
    pipe = ensemble(["a"], ["b", "c", "d"], [("same", IN, OUT), *links])
    write(tmp_path, {"same": SAME, "spoiler": SAME.replace('"identity"', '"python"'), "e": pipe})
    (tmp_path / "spoiler" / "1" / "model.py").write_text(SPOILER)

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model = repository.get("e")
            found = (await model.infer(asking(model, a=row(5)))).outputs
            assert {name: array[0, 0] for name, array in found.items()} == {"b": 5, "c": 6, "d": 6}

    asyncio.run(run())


def test_one_ensemble_holds_so_many_requests(tmp_path: Path) -> None:
    write(tmp_path, {"slow": SLOW % 100, "e": ensemble(["a"], ["b"], [("slow", IN, OUT)])})

    async def run() -> None:
        async with Loaded(tmp_path, max_model_requests=2) as repository:
            model = repository.get("e")
            found = await asyncio.gather(
                *(model.infer(asking(model, a=row(k))) for k in range(3)), return_exceptions=True
            )
            assert [isinstance(one, InferResponse) for one in found] == [True, True, False]
            what = "[request id: <id_unknown>] Exceeds maximum queue size: 2 requests to model 'e' wait for answers"
            assert str(found[2]) == what and model.statistics.failures == {"REJECTED": 1}

    asyncio.run(run())


# ---------------------------------------------------------------------- decoupled


def repeated(model: Model, *values: int, outputs: Sequence[str] = ()) -> InferRequest:
    n, nothing = len(values), np.zeros(max(1, len(values)), np.uint32)
    data = np.array(values, np.int32)
    return asking(model, outputs, values=data, delays=nothing[:n], wait=nothing[:1])


STREAM = """platform: "ensemble"
input [ { name: "values" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "delays" data_type: TYPE_UINT32 dims: [ -1 ] },
        { name: "wait" data_type: TYPE_UINT32 dims: [ 1 ] } ]
output { name: "%s" data_type: TYPE_INT32 dims: [ -1 ] }
ensemble_scheduling {
  step { model_name: "repeat" input_map { key: "IN" value: "values" } input_map { key: "DELAY" value: "delays" }
         input_map { key: "WAIT" value: "wait" } output_map { key: "OUT" value: "one" } }
  %s }
"""
AFTER = """step { model_name: "wobbly"
       input_map { key: "INPUT0" value: "one" } output_map { key: "OUTPUT0" value: "two" } }
max_inflight_requests: %d"""
WOBBLY = """
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        values = request.inputs()[0].as_numpy()
        time.sleep(0.004 if int(values[0]) % 2 else 0.0)
        if int(values[0]) == 13:
            raise ValueError("thirteen")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values * 10)])]
"""


def test_responses_that_the_next_step_is_too_slow_for_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.model_repository.request.response_stream.UNCOUNTED_RESPONSE_BYTES", 0)
    monkeypatch.setattr("millrace.model_repository.request.response_stream.MAX_UNREAD_BYTES", 10_000)
    wobbly = identity("INT32", "-1", 'parameters { key: "execute_delay_ms" value { string_value: "200" } }')
    write_models(tmp_path, {"repeat": REPEAT, "wobbly": wobbly, "s": STREAM % ("two", AFTER % 1)})

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model = repository.get("s")
            with pytest.raises(StatusError, match=r"responses of \d+ bytes wait for their readers") as failed:
                await ResponseStream(model, repeated(model, *range(100))).next()
            assert failed.value.code is Code.UNAVAILABLE and model.unread_bytes == model._n_open == 0

    asyncio.run(run())


@pytest.mark.parametrize("n_inflight", [0, 1, 3])
def test_each_response_of_a_decoupled_step_goes_on_its_way_in_order(tmp_path: Path, n_inflight: int) -> None:
    wobbly = identity("INT32", "-1", "instance_group { count: 4 }").replace('"identity"', '"python"')
    models = {"repeat": REPEAT, "wobbly": wobbly, "s": STREAM % ("two", AFTER % n_inflight), "p": STREAM % ("one", "")}
    write_models(tmp_path, models)
    (tmp_path / "wobbly" / "1" / "model.py").write_text(WOBBLY)

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            model, plain, wobbly = repository.get("s"), repository.get("p"), repository.get("wobbly")
            assert model.is_decoupled and model.config.model_transaction_policy is not None
            assert [r.outputs["one"].tolist() async for r in ResponseStream(plain, repeated(plain, 5, 6))] == [[5], [6]]
            values, most = [k for k in range(40) if k != 13], 0
            found = list[int]()
            async for response in ResponseStream(model, repeated(model, *values)):
                found += response.outputs["two"].tolist()
                most = max(most, wobbly._n_open)
            assert found == [value * 10 for value in values], "in order, whatever takes longer"
            assert most <= (n_inflight or 16)
            assert [r async for r in ResponseStream(model, repeated(model))] == []
            responses = ResponseStream(model, repeated(model, 1, 13, 2))
            with pytest.raises(StatusError, match=r"in ensemble 's', .*thirteen"):
                assert [r.outputs["two"].tolist() async for r in responses] != [[10], [20]], "it ends with an error"
            cut = ResponseStream(model, repeated(model, *values))
            await cut.next()
            cut.close()
            assert model._n_open == 0 and model.unread_bytes == 0
            await becomes(lambda: repository.get("repeat")._n_open == wobbly._n_open == 0)
            assert wobbly._n_pins == 0

    asyncio.run(run())
