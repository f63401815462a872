"""Checks of the GPU: whether there is one, and whether it supports an engine's precisions."""

from collections.abc import Collection

import torch

from millrace.engine.cache_specs import KvFormat
from millrace.engine.cuda.device_lookup import first_line
from millrace.engine.cuda.layers import ATTENTION
from millrace.engine.cuda.lowered import LoweredGraph
from millrace.engine.cuda.precision_support import WIDE, check_keeps, multiplied_by
from millrace.errors import EngineError, MachineError
from millrace.graph.types import Graph
from millrace.kernels.elementwise.torch_ref import unsupported
from millrace.kernels.matmul.coded import E4M3
from millrace.kernels.matmul.op import precision_of
from millrace.kernels.operators import static_dim
from millrace.kernels.torch_operators import torch_operators
from millrace.machine.devices import check_multiplies

CODES = {KvFormat.INT8: torch.int8, KvFormat.FP8: E4M3}


def precisions_used(lowered: LoweredGraph, kv: KvFormat | None = None) -> tuple[str, ...]:
    """Return the precisions that a GPU must multiply, by the names of machine/devices.py; all multiply float32."""
    dtype = lowered.dtype
    result = {} if dtype in WIDE else {dtype: True}
    for node in lowered.placement.coded:
        precision = precision_of(node)
        meets_fp8 = not precision.takes_bytes and node in lowered.e4m3
        result |= dict.fromkeys(multiplied_by(precision, dtype, meets_fp8=meets_fp8), True)
    if kv == KvFormat.FP8:
        result["fp8"] = True
    return tuple(result)


def check_runs(graph: Graph, kv: KvFormat | None) -> None:
    """Check that all operators and the KV format have kernels. raises EngineError. kv: as in CudaExecutor"""
    available = torch_operators()
    unknown = sorted({node.op for node in graph.nodes} - available.keys())
    if unknown:
        raise EngineError(f"{', '.join(unknown)} of this model on a GPU", f"one of {', '.join(sorted(available))}",
                          "run it on the CPU")  # fmt: skip
    for node in graph.nodes:
        if node.op == "elementwise" and (wrong := unsupported(node)):
            raise EngineError(f"element-wise {wrong} of this model on a GPU", "arithmetic of f32", "run it on the CPU")
    if any(node.attrs.get("sinks") for node in graph.nodes):
        raise EngineError("attention sinks of this model on a GPU", "attention without them", "run it on the CPU")
    if any(node.op == "full_attention" and len(node.inputs) > 4 for node in graph.nodes):
        raise EngineError("biases by distance of this model on a GPU", "attention without them", "run it on the CPU")
    check_keeps(kv)
    sizes = {static_dim(n.inputs[1], 2) for n in graph.nodes if n.op in ATTENTION}
    if kv == KvFormat.FP8 and (odd := [n for n in sorted(sizes) if n & n - 1]):
        raise EngineError(f"keys and values in fp8 of heads of {odd[0]} on a GPU", "heads of a power of two",
                          "keep them in int8")  # fmt: skip


def check_gpu(device: torch.device, needed: Collection[str]) -> None:
    """Check the device. raises MachineError if CUDA finds none, ConfigError if it lacks a precision"""
    try:
        torch.cuda.init()
        result = torch.cuda.get_device_properties(device)
    except (RuntimeError, AssertionError) as error:  # no driver, one too old, no such GPU; PyTorch without CUDA
        raise MachineError(
            f"no GPU to run on: {first_line(error)}",
            f"an NVIDIA GPU with a driver, and PyTorch for CUDA (this is {torch.__version__})",
            "run on the CPU, or see what nvidia-smi says",
        ) from error
    check_multiplies(result.name, (result.major, result.minor), needed)
