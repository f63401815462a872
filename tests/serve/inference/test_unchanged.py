"""A load of what is served already, as its files and its configuration are: nothing is loaded."""

import asyncio
from pathlib import Path

from millrace.serve.inference.ensemble import Ensemble
from tests.support.loaded import Loaded
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
            await repository.unload("m")
            await repository.load("m")
            assert repository.get("m").config.max_batch_size == 0, "it was gone"
            pipe = repository.get("pipe")
            await repository.load("pipe")
            assert repository.get("pipe") is not pipe and isinstance(pipe, Ensemble), "its members may have changed"

    asyncio.run(run())


IN = [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]}]
OUT = [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}]
