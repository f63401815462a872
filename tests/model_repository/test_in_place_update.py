"""A load of what is served already: nothing is loaded, or only instances that are not there."""

import asyncio
from pathlib import Path

import pytest

from millrace.model_repository.models.ensemble import Ensemble
from millrace.model_repository.models.model_version import Model
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.request.tensors import Array
from tests.support.loaded import Loaded, becomes
from tests.support.python_models import ANY, HEAD, SAY, asked, loaded, text, write
from tests.support.repository import identity, write_models

M = identity("FP32", "-1")
PIPE = """platform: "ensemble" input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
ensemble_scheduling { step { model_name: "m" input_map { key: "INPUT0" value: "INPUT0" }
  output_map { key: "OUTPUT0" value: "OUTPUT0" } } }"""


def test_only_what_changed_is_loaded_anew(tmp_path: Path) -> None:
    write_models(tmp_path, {"m": M, "pipe": PIPE})

    async def run() -> None:
        async with Loaded(tmp_path, model_control_mode="explicit", load_model=("*",)) as repository:
            first = repository.get("m")
            await repository.load("m")
            assert repository.get("m") is first, "neither a file nor its configuration changed"
            (tmp_path / "m" / "1" / "weights").touch()
            await repository.load("m")
            second = repository.get("m")
            assert second is not first
            await repository.load("m", {"backend": "identity", "max_batch_size": 4, "input": IN, "output": OUT})
            third = repository.get("m")
            assert third is not second and third.config.max_batch_size == 4
            await repository.load("m")
            assert repository.get("m").config.max_batch_size == 0, "what a client brought holds until the next load"
            pipe = repository.get("pipe")
            await repository.load("pipe")
            assert repository.get("pipe") is not pipe and isinstance(pipe, Ensemble), "its members may have changed"

    asyncio.run(run())


IN = [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]}]
OUT = [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}]


COUNTED = (
    HEAD
    + """
    def initialize(self, args):
        self.state = Path(args["model_repository"]).parent.parent
        assert not (self.state / "broken").exists(), "broken"
        self.count("i")
    def finalize(self):
        self.count("f")
    def count(self, what):
        with (self.state / "counted").open("a") as file:
            file.write(what)
    def execute(self, requests):
        while (self.state / "wait").exists():
            time.sleep(0.005)
        return [said("done") for _ in requests]
"""
    + SAY
)
GROUP = "instance_group [ {{ kind: KIND_CPU count: {} }} ]"


def test_instances_come_and_go_while_the_others_serve(tmp_path: Path) -> None:
    root = tmp_path / "models"

    def counted() -> tuple[int, int]:
        text = (tmp_path / "counted").read_text()
        return text.count("i"), text.count("f")

    def write_group(count: int, more: str = "") -> None:
        code = "import time\nfrom pathlib import Path\n" + COUNTED
        if not (root / "m").exists():
            write(root, "m", code, ANY % "")
        (root / "m" / "config.pbtxt").write_text(ANY % (GROUP.format(count) + more))

    async def answer(model: Model) -> Array:
        return (await model.infer(asked(model, IN=text("x")))).outputs["OUT"]

    async def run() -> None:
        write_group(2)
        async with loaded(root) as repository:
            await repository.load("m")
            first = repository.get("m")
            assert counted() == (2, 0)
            write_group(4)
            await repository.load("m")
            assert counted() == (4, 0) and repository.get("m") is first
            assert first.config.instance_group[0].count == 4
            (tmp_path / "broken").touch()
            write_group(5)
            with pytest.raises(StatusError, match=r"version 1 is at UNAVAILABLE state: .*broken"):
                await repository.load("m")
            (tmp_path / "broken").unlink()
            assert counted() == (4, 0) and (await answer(first)).tolist() == [b"done"]
            (tmp_path / "wait").touch()
            waiting = [asyncio.ensure_future(answer(first)) for _ in range(6)]
            write_group(1)
            shrinking = asyncio.ensure_future(repository.load("m"))
            await asyncio.sleep(0.1)
            assert counted() == (4, 0) and not shrinking.done(), "they compute"
            (tmp_path / "wait").unlink()
            await shrinking
            assert [array.tolist() for array in await asyncio.gather(*waiting)] == [[b"done"]] * 6
            assert counted() == (4, 3)
            write_group(1, " max_batch_size: 0 parameters { key: 'a' value: { string_value: 'b' } }")
            await repository.load("m")
            assert repository.get("m") is not first, "more than instances is another one"
            await becomes(lambda: counted() == (5, 4))
            await repository.unload("m")
            await becomes(lambda: counted() == (5, 5))

    asyncio.run(run())
