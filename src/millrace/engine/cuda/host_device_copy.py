"""Between host and device without waiting for what is queued there: the host goes on and prepares the next step.

A copy from or to memory that is not pinned waits until the device has done all that comes before it.
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

SLAB_BYTES = 32 << 20  # of weights on their way
_BF16 = np.dtype(ml_dtypes.bfloat16)


def on_device_context(device: torch.device) -> AbstractContextManager[Any]:
    """Within it kernels, streams and events are that device's: each thread has a device of its own, else the first.

    raises ExecutionError where Triton cannot compile a kernel for it, or it lacks what one takes
    """
    return nullcontext() if device.type == "cpu" else _there(device)


@contextmanager
def _there(device: torch.device) -> Iterator[None]:
    from triton.errors import TritonError  # which is no RuntimeError, as what PyTorch raises of a device is

    try:
        with torch.cuda.device(device):
            yield
    except TritonError as error:
        raise ExecutionError(f"a kernel cannot run on this GPU: {first_line(error)}") from error


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host as copies to the device want it. Its memory is reused when the copy is done, not before."""
    return x if device.type == "cpu" else x.pin_memory()


def on_device(x: NDArray[Any], device: torch.device) -> Tensor:
    """Its copy there; on a CPU it may be the array itself."""
    return pinned(_tensor(x), device).to(device, non_blocking=True)


def kept_on_device(x: NDArray[Any], target: Tensor) -> None:
    """What stays there, where it was given room, of another type if need be: it goes as it is, and is cast there."""
    _in_slabs(_tensor(x), target)


def rows_on_device(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Parts (R, ...) of one type and width, one behind the other."""
    merged = torch.empty((sum(map(len, parts)), *parts[0].shape[1:]), dtype=parts[0].dtype, device=device)
    for part, room in zip(parts, merged.split([len(part) for part in parts]), strict=True):
        _in_slabs(part, room)
    return merged


def _in_slabs(host: Tensor, target: Tensor) -> None:
    """While a slab is on its way the next one comes into pinned memory; a slab is all that it takes on the device."""
    rows, device = max(1, SLAB_BYTES // max(1, host[:1].nbytes)), target.device
    for part, slab in zip(target.split(rows), host.split(rows), strict=True):
        part.copy_(pinned(slab, device).to(device, non_blocking=True))


def _tensor(x: NDArray[Any]) -> Tensor:
    """PyTorch does not take NumPy's bfloat16 for its own."""
    host = np.ascontiguousarray(x)
    return torch.from_numpy(host.view(np.int16)).view(torch.bfloat16) if host.dtype == _BF16 else torch.from_numpy(host)


def _coming(x: Tensor) -> Tensor:
    """To the host, when all that is queued is done."""
    if x.device.type == "cpu":
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


@dataclass(frozen=True, slots=True)
class AsyncCopy:
    """Tensors that a device computes, on their way to the host."""

    tensors: tuple[Tensor, ...]
    done: torch.cuda.Event | None  # None: they are there

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "AsyncCopy":
        """Whose computation is queued: so are the copies, before all that is queued later. What is the host's stays."""
        if all(x.device.type == "cpu" for x in tensors):
            return cls(tuple(tensors), None)
        on_host = tuple(_coming(x) for x in tensors)
        done = torch.cuda.Event()
        done.record()
        return cls(on_host, done)

    def arrived(self) -> tuple[NDArray[Any], ...]:
        """When they have. raises RuntimeError where the device has failed"""
        if self.done is not None:
            self.done.synchronize()
        return tuple(x.numpy() for x in self.tensors)
