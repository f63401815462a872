"""How long a server takes from its process's start until it is ready: Llama-3.1-8B's shape in FP8, from a checkpoint.

The weights go to the device as the file has them, so such a checkpoint is what a built engine is on a CPU.
"""

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import write_fp8_checkpoint
from benchmarks.gpu.model import gpu_of
from millrace.bench.server_process import ServerProcess
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.config import ModelConfig
from millrace.compile.device import device_engine
from millrace.compile.settings import BuildSettings
from millrace.engine.cuda.found import CPU


def started(config: ModelConfig, device: str, start_s: float) -> dict[str, Any]:
    """The first start compiles kernels, and reads the file once more for its digest; the second finds both."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkpoint"
        write_fp8_checkpoint(config, folder)
        weights_bytes = (folder / "model.safetensors").stat().st_size
        if device == CPU:
            engine = device_engine("dry", Checkpoint.open(folder), BuildSettings(max_batch=4), gpu_of(CPU), None)
            engine.on_gpu(engine.pages_per_sequence).close()
            engine.close()
            return {"checkpoint_bytes": weights_bytes}
        found = []
        for _ in range(2):
            with ServerProcess(folder, ("--device", device), start_s) as server:
                found.append(server.ready_s)
    return {"checkpoint_bytes": weights_bytes, "first_ready_s": found[0], "ready_s": found[1]}
