"""Tensors of a model in a process of its own: every size and type, one copy each way, and memory that comes back."""

import asyncio
import gc
from pathlib import Path

import numpy as np
import pytest

from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.request_validation import RawInput
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.request.tensors import Array, objects
from tests.support.python_children import child_of, load
from tests.support.python_models import ANY, HEAD, OWN, asked, loaded, one, write

SAME = """
    def execute(self, requests):
        self.kept = [r.inputs()[0].as_numpy() for r in requests]
        for array in self.kept:
            array += 1  # in place: its memory is its own
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for array in self.kept]
"""
FLOATS = """backend: "python" max_batch_size: 64 dynamic_batching { } %s
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""


def test_tensors_of_every_size_and_type_go_there_and_back(tmp_path: Path) -> None:
    kinds = [np.bool_, np.uint8, np.uint64, np.int16, np.float16, np.float64]
    echo = "    def execute(self, requests):\n        return [pb_utils.InferenceResponse(" + (
        "[pb_utils.Tensor('O' + t.name()[1:], t.as_numpy()) for t in r.inputs()]) for r in requests]\n"
    )
    names = ["BOOL", "UINT8", "UINT64", "INT16", "FP16", "FP64"]
    tensors = "".join(
        f'{side} {{ name: "{letter}{i}" data_type: TYPE_{name} dims: [ -1 ] }} '
        for side, letter in (("input", "I"), ("output", "O"))
        for i, name in enumerate(names)
    )
    write(tmp_path, "kinds", HEAD + echo, f'backend: "python" {tensors} {OWN}')
    write(tmp_path, "same", HEAD + SAME, FLOATS % OWN)
    write(tmp_path, "words", HEAD + echo.replace("'O' + t.name()[1:]", "'OUT'"), ANY % OWN)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await load(repository, "kinds", "same", "words")
            model = repository.get("same")
            for n in (0, 1, 4095, 4096, 4097, 300_000, 5_000_000):
                sent = np.arange(n, dtype=np.float32)[None]
                sent.flags.writeable = False
                found = await model.infer(asked(model, IN=sent))
                assert np.array_equal(found.outputs["OUT"], sent + 1), n
            several = [np.full((1, 20_000), i, np.float32) for i in range(30)]
            answers = await asyncio.gather(*(model.infer(asked(model, IN=array)) for array in several))
            assert all((a.outputs["OUT"] == i + 1).all() for i, a in enumerate(answers))
            model = repository.get("kinds")
            rng = np.random.default_rng(1)
            arrays: list[Array] = [rng.integers(0, 2, 50_000).astype(kind) for kind in kinds]
            request = InferRequest({})
            given = [RawInput(f"I{i}", n, a.shape, a) for i, (n, a) in enumerate(zip(names, arrays, strict=True))]
            model.checker.attach_inputs(request, given)
            outputs = (await model.infer(request)).outputs
            for i, array in enumerate(arrays):
                assert outputs[f"O{i}"].dtype == array.dtype and np.array_equal(outputs[f"O{i}"], array)
            words = [b"", b"x" * 70_000, "ü".encode(), bytes(range(256))]
            assert (await one(repository, "words", objects(words))).tolist() == words

    asyncio.run(run())


def test_memory_comes_back_when_answers_are_let_go(tmp_path: Path) -> None:
    write(tmp_path, "same", HEAD + SAME.replace("self.kept", "kept"), FLOATS % OWN)
    write(tmp_path, "raises", HEAD + "    def execute(self, requests):\n        raise ValueError\n", FLOATS % OWN)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await load(repository, "same", "raises")
            for _ in range(20):
                with pytest.raises(StatusError):
                    await repository.get("raises").infer(
                        asked(repository.get("raises"), IN=np.zeros((1, 262_144), np.float32))
                    )
            assert child_of(repository, "raises")._process.frames.arena.used_bytes <= 4 << 20, "of 20 MiB"
            model, child = repository.get("same"), child_of(repository, "same")
            held = []
            for i in range(60):
                found = await model.infer(asked(model, IN=np.full((1, 262_144), i, np.float32)))
                if i % 20 == 0:
                    held.append(found.outputs["OUT"])
            assert child._process.frames.arena.used_bytes <= 4 << 20, "of 60 MiB"
            assert [array[0, 0] for array in held] == [1, 21, 41], "what is held stays what it was"
            n_segments = len(child._process.frames._mapped._segments)
            assert n_segments <= 2, f"{n_segments} segments of 16 MiB for 3 MiB that are held"
            maps = Path(f"/proc/{child._process.pid}/maps").read_text()
            assert "memfd:millrace" in maps and "/dev/shm" not in maps, "no memory of its has a name"

    asyncio.run(run())
    gc.collect()
    assert "memfd:millrace" not in Path("/proc/self/maps").read_text(), "nothing is left"


def test_a_tensor_is_copied_once_each_way(tmp_path: Path) -> None:
    """What the model is given, and what the server is answered, is the shared memory itself."""
    code = HEAD + """
    def execute(self, requests):
        given = requests[0].inputs()[0].as_numpy()
        at, lines = given.__array_interface__["data"][0], open("/proc/self/maps").read().splitlines()
        ranges = [[int(n, 16) for n in line.split()[0].split("-")] for line in lines if "memfd:millrace" in line]
        assert any(first <= at < last for first, last in ranges), "a copy"
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", given)])]
"""  # fmt: skip
    write(tmp_path, "m", code, FLOATS % OWN)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model = repository.get("m")
            array = np.arange(262_144, dtype=np.float32)[None]
            found = (await model.infer(asked(model, IN=array))).outputs["OUT"]
            (segment,) = child_of(repository, "m")._process.frames._mapped._segments.values()
            assert np.array_equal(found, array) and np.shares_memory(found, np.frombuffer(segment, np.uint8))

    asyncio.run(run())
