"""The GPU at hand: whether there is one, and whether it multiplies what an engine wants."""

from collections.abc import Collection

import torch

from millrace.engine.cuda.loaded import PRODUCTS
from millrace.engine.kv import KvFormat
from millrace.errors import MachineError
from millrace.graph.types import Graph
from millrace.kernels.declare import WeightFormat
from millrace.kernels.matmul.op import precision_of
from millrace.machine.devices import check_multiplies


def precisions_used(
    graph: Graph, dtype: str, fp8_rows: Collection[str] = (), kv: KvFormat | None = None
) -> tuple[str, ...]:
    """What a GPU must multiply to run it, as machine/devices.py calls it; float32 they all do."""
    found = {} if dtype == "fp32" else {dtype: True}
    for node in graph.nodes:
        precision = precision_of(node) if node.op in PRODUCTS else None
        if precision is None or not precision.coded:
            continue
        meets_fp8 = not precision.takes_bytes and not set(fp8_rows).isdisjoint(node.origin)
        found["int8" if precision.takes_bytes else "bf16" if dtype == "fp32" else dtype] = True
        if precision.weights == WeightFormat.FP8 or meets_fp8:
            found["fp8"] = True
    if kv == KvFormat.FP8:
        found["fp8"] = True
    return tuple(found)


def check_gpu(device: torch.device, needed: Collection[str]) -> None:
    """raises MachineError where CUDA finds none, ConfigError where it lacks a precision"""
    try:
        torch.cuda.init()
        found = torch.cuda.get_device_properties(device)
    except (RuntimeError, AssertionError) as error:  # no driver, one too old, no such GPU; PyTorch without CUDA
        raise MachineError(
            f"no GPU to run on: {str(error).splitlines()[0]}",
            f"an NVIDIA GPU with a driver, and PyTorch for CUDA (this is {torch.__version__})",
            "run on the CPU, or see what nvidia-smi says",
        ) from error
    check_multiplies(found.name, (found.major, found.minor), needed)
