"""Ensembles of models with batches and models without, as Triton's own tests have them (`batch_to_nobatch`, ...)."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from millrace.model_repository.repository.multi_repository import read_repositories
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.request.tensors import Array, objects
from tests.support.ensembles import asking, ensemble
from tests.support.loaded import Loaded
from tests.support.repository import identity, write_models

MEMBERS = {
    "batched": identity("INT32", "4", "max_batch_size: 8"), "whole": identity("INT32", "4"),
    "rows": identity("INT32", "-1, 4"), "texts": identity("STRING", "1", "max_batch_size: 8"),
    "text": identity("STRING", "1"),
}  # fmt: skip


def chain(*members: str, max_batch: int = 8, dims: str = "4", kind: str = "INT32") -> str:
    names = ["INPUT0", *(f"t{i}" for i in range(1, len(members))), "OUTPUT0"]
    steps = [(member, {"INPUT0": names[i]}, {"OUTPUT0": names[i + 1]}) for i, member in enumerate(members)]
    return ensemble(["INPUT0"], ["OUTPUT0"], steps, kind=kind, dims=dims, max_batch=max_batch)


CHAINS = {
    "stripped": chain("whole"), "as_rows": chain("rows"), "there_and_back": chain("batched", "whole", "batched"),
    "made": chain("batched", max_batch=0), "rows_in": chain("batched", max_batch=0, dims="-1, 4"),
    "made_again": chain("batched", "rows", "batched", "whole", max_batch=0), "outer": chain("made", "batched"),
    "strings": chain("texts", "text", kind="STRING", dims="1"),
    "a_string": chain("texts", "text", kind="STRING", dims="1", max_batch=0),
}  # fmt: skip


def numbers(*shape: int) -> Array:
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("stripped", numbers(1, 4)), ("as_rows", numbers(1, 4)), ("as_rows", numbers(3, 4)),
        ("there_and_back", numbers(1, 4)), ("made", numbers(4)), ("rows_in", numbers(1, 4)), ("rows_in", numbers(3, 4)),
        ("made_again", numbers(4)), ("outer", numbers(1, 4)), ("strings", objects([b"a b"]).reshape(1, 1)),
        ("a_string", objects([b"a b"])),
    ],
)  # fmt: skip
def test_a_batch_of_one_is_made_and_taken_off(tmp_path: Path, name: str, given: Array) -> None:
    """What comes out is what went in, and has its shape."""
    write_models(tmp_path, MEMBERS | CHAINS)
    assert [p.what for model in read_repositories([tmp_path])[0].models for p in model.problems] == []

    async def run() -> None:
        async with Loaded(tmp_path, model_control_mode="explicit", load_model=(name,)) as repository:
            model = repository.get(name)
            (found,) = (await model.infer(asking(model, INPUT0=given))).outputs.values()
            assert found.shape == given.shape and found.tolist() == given.tolist()

    asyncio.run(run())


def test_a_larger_batch_is_not_one_tensor(tmp_path: Path) -> None:
    write_models(tmp_path, MEMBERS | CHAINS)

    async def run() -> None:
        async with Loaded(tmp_path, model_control_mode="explicit", load_model=("stripped",)) as repository:
            model = repository.get("stripped")
            with pytest.raises(StatusError, match=r"for model 'whole'. Expected \[4\], got \[2,4\]"):
                await model.infer(asking(model, INPUT0=numbers(2, 4)))

    asyncio.run(run())
