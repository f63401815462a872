"""Copies between host and device that do not wait for queued work, so that the host can prepare the next step.

A copy from or to memory that is not pinned waits for all earlier work of the device.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace.engine.cuda.device_lookup import first_line
from millrace.engine.executor import ExecutionError

SLAB_BYTES = 32 << 20  # per copy of weights
_BF16 = np.dtype(ml_dtypes.bfloat16)


def on_device_context(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device current for kernels, streams and events; each thread otherwise uses the first device.

    raises ExecutionError if Triton cannot compile a kernel, or the device lacks resources for one
    """
    return nullcontext() if device.type == "cpu" else _device_context(device)


@contextmanager
def _device_context(device: torch.device) -> Iterator[None]:
    from triton.errors import TritonError  # not a RuntimeError, unlike PyTorch's errors of a device

    try:
        with torch.cuda.device(device):
            yield
    except TritonError as error:
        raise ExecutionError(f"a kernel cannot run on this GPU: {first_line(error)}") from error


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor into pinned memory, which is reused after the copy to the device has finished."""
    return x if device.type == "cpu" else x.pin_memory()


def on_device(x: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to the device; on a CPU the result may share its memory."""
    return pinned(_tensor(x), device).to(device, non_blocking=True)


def kept_on_device(x: NDArray[Any], target: Tensor) -> None:
    """Copy an array into `target`, casting on the device if the types differ."""
    _in_slabs(_tensor(x), target)


def rows_on_device(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Copy parts (R, ...) of one type and width to the device, concatenated."""
    merged = torch.empty((sum(map(len, parts)), *parts[0].shape[1:]), dtype=parts[0].dtype, device=device)
    for part, room in zip(parts, merged.split([len(part) for part in parts]), strict=True):
        _in_slabs(part, room)
    return merged


def _in_slabs(host: Tensor, target: Tensor) -> None:
    """Copy through two pinned slabs: one is filled while the other is copied. Takes one slab of device memory."""
    rows, device = max(1, SLAB_BYTES // max(1, host[:1].nbytes)), target.device
    for part, slab in zip(target.split(rows), host.split(rows), strict=True):
        part.copy_(pinned(slab, device).to(device, non_blocking=True))


def _tensor(x: NDArray[Any]) -> Tensor:
    """Convert an array; PyTorch does not accept NumPy's bfloat16."""
    host = np.ascontiguousarray(x)
    return torch.from_numpy(host.view(np.int16)).view(torch.bfloat16) if host.dtype == _BF16 else torch.from_numpy(host)


def _copy_to_host(x: Tensor) -> Tensor:
    """Start a copy to the host, after all queued work."""
    if x.device.type == "cpu":
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


@dataclass(frozen=True, slots=True)
class AsyncCopy:
    """Tensors in transit from the device to the host."""

    tensors: tuple[Tensor, ...]
    done: torch.cuda.Event | None  # None: the copies are complete

    @classmethod
    def start(cls, tensors: Sequence[Tensor]) -> "AsyncCopy":
        """Queue copies after the tensors' computation, before later work. Host tensors are kept as they are."""
        if all(x.device.type == "cpu" for x in tensors):
            return cls(tuple(tensors), None)
        on_host = tuple(_copy_to_host(x) for x in tensors)
        done = torch.cuda.Event()
        done.record()
        return cls(on_host, done)

    def arrived(self) -> tuple[NDArray[Any], ...]:
        """Wait for the copies and return the arrays. raises RuntimeError if the device has failed"""
        if self.done is not None:
            self.done.synchronize()
        return tuple(x.numpy() for x in self.tensors)
