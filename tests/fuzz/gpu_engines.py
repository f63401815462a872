"""Engine folders on a GPU, with tensors of this CPU in its place: their tables say anything, and are sealed again."""

import json
from pathlib import Path
from random import Random

import msgspec

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.lower_gpu.from_engine import engine_from_folder
from millrace.compile.precision import precision_map
from millrace.compile.settings import BuildSettings
from millrace.compile.source import Source
from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.manifest import (
    GRAPH,
    MANIFEST,
    PROGRAM_TABLE,
    FileEntry,
    file_checksum,
    read_manifest,
    sealed,
)
from millrace.engine.cuda.device_lookup import Gpu
from millrace.engine.dummy_step import dummy_step
from millrace.engine.executor import ExecutionError
from tests.fuzz.driver import Case
from tests.fuzz.mutate import json_bytes, mutate_json
from tests.fuzz.originals import write_checkpoint

GPU = Gpu("cpu", "NVIDIA H100, of this CPU's tensors", (9, 0), 1 << 30, 1)
ASKED = BuildSettings(max_batch=2, max_context=64)


def gpu_engines(folder: Path) -> Case:
    source = Source.from_checkpoint(Checkpoint.open(write_checkpoint(folder / "checkpoint")))
    out = folder / "engine"
    write_engine(source, plan_engine(source, BuildOptions(precision=precision_map("w4a8", 32))), out, name="fuzz")
    manifest = read_manifest(out)
    goods = {name: (out / name).read_bytes() for name in (GRAPH, PROGRAM_TABLE)}
    tables = {name: json.loads(good) for name, good in goods.items()}

    def case(rng: Random) -> None:
        name = rng.choice([GRAPH, GRAPH, PROGRAM_TABLE])
        (out / name).write_bytes(json_bytes(rng, mutate_json(rng, tables[name])))
        entry = FileEntry((out / name).stat().st_size, file_checksum(out / name))
        changed = msgspec.structs.replace(manifest, files={**manifest.files, name: entry})
        (out / MANIFEST).write_bytes(msgspec.json.encode(sealed(changed)))
        try:
            _run(out)
        finally:
            (out / name).write_bytes(goods[name])

    return case


def _run(folder: Path) -> None:
    engine = engine_from_folder(Engine.open(folder), ASKED, GPU, None)
    executor = engine.on_gpu(engine.pages_per_sequence)
    try:
        with engine._failing(0, "nothing"):  # as where a GPU is warmed by such steps
            executor.run(dummy_step([3, 1], 0, 2, vocab=min(engine.manifest.vocab_size, 300)))
    except ExecutionError:
        pass  # limits that the step does not fit
    finally:
        executor.close()
        engine.close()
