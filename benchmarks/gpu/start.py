"""How long a server takes from its process's start until it is ready: Llama-3.1-8B's shape in FP8, from an engine.

Where the native core is not there, which writes engines, from the checkpoint of which it would be built: E4M3 codes go
to the device from either.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import write_fp8_checkpoint
from benchmarks.gpu.model import gpu_of
from millrace.bench.run.server_process import ServerProcess
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.config.model_config import ModelConfig
from millrace.compile.builder import Builder
from millrace.compile.lower_gpu.from_checkpoint import engine_from_checkpoint
from millrace.compile.lower_gpu.from_engine import engine_from_folder
from millrace.compile.settings import BuildSettings
from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.manifest import MANIFEST
from millrace.engine.cuda.device_lookup import CPU
from millrace.errors import MachineError


def started(config: ModelConfig, device: str, start_s: float) -> dict[str, Any]:
    """The first start compiles kernels, the second finds them."""
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = Path(temporary) / "checkpoint"
        write_fp8_checkpoint(config, checkpoint)
        folder, about = _built(checkpoint, Path(temporary) / "engine")
        if device == CPU:
            _dry(folder)
            return about
        found = []
        for _ in range(2):
            with ServerProcess(folder, ("--device", device), start_s) as server:
                found.append(server.ready_s)
    return about | {"first_ready_s": found[0], "ready_s": found[1]}


def _built(checkpoint: Path, engine: Path) -> tuple[Path, dict[str, Any]]:
    """What is started, and what is said of it. The disk need not hold both for long."""
    weights_bytes = (checkpoint / "model.safetensors").stat().st_size
    try:
        asked = BuildSettings(tune=0, evaluate=False)
        Builder.from_settings("m", Checkpoint.open(checkpoint), asked, None, for_gpu=True).write(engine)
    except MachineError as error:
        return checkpoint, {"of": "checkpoint", "weights_bytes": weights_bytes, "not_built": error.what}
    shutil.rmtree(checkpoint)
    return engine, {"of": "engine", "weights_bytes": (engine / "weights.bin").stat().st_size}


def _dry(folder: Path) -> None:
    """Loaded once, without a server."""
    asked, gpu = BuildSettings(max_batch=4), gpu_of(CPU)
    if (folder / MANIFEST).is_file():
        engine = engine_from_folder(Engine.open(folder), asked, gpu, None)
    else:
        engine = engine_from_checkpoint("dry", Checkpoint.open(folder), asked, gpu, None)
    engine.on_gpu(engine.pages_per_sequence).close()
    engine.close()
