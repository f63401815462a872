"""A GPU that computes nothing: tensors of `cuda` without memory, under the executor as it is.

PyTorch's FakeTensorMode knows each tensor's device, type, sizes and strides, and raises where the host would have to
know what is in one. What it does not mind is looked at here: copies that wait for what is queued, what a capture
forbids, operators and kernels that are given the host's tensors. No driver is needed, nor a PyTorch for CUDA.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from millrace.engine.cuda import cuda_graphs, host_device_copy
from millrace.engine.cuda.device_constants import Loaded
from millrace.engine.cuda.executor import CudaExecutor
from millrace.engine.executor import ExecutorLimits
from millrace.kernels.matmul import coded
from millrace.kernels.matmul.coded import QuantizedRows

DEVICE = torch.device("cuda:0")
MAX_PROGRAMS = 65535  # along the second and the third axis of a launch
_CUDA, _META = 1, 14  # kinds of devices, as PyTorch numbers them
_COPIES = "aten::copy_", "aten::_to_copy"
# Whose result, or its shape, the host would wait for; in a PyTorch without CUDA nobody else says so.
_WAIT = "aten::nonzero", "aten::masked_select", "aten::_local_scalar_dense", "aten::item", "aten::_unique2"
_INDEXED = "aten::index", "aten::index_put", "aten::index_put_"  # by numbers, not by a mask


class FakeCuda(TorchDispatchMode):  # type: ignore[misc]  # PyTorch's has no types here
    """launched: our kernels by name; called: PyTorch's operators on tensors of the device; both in order

    specialised: kernels that Triton does not interpret, and what it would compile them for beside their constants
    compiles: it does compile them, to the device's own code
    warming: copies may wait, but for those within a capture
    """

    def __init__(self) -> None:
        super().__init__()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.launched, self.called = list[str](), list[str]()
        self.specialised, self.compiles = set[tuple[str, str]](), False
        self.kernels = set[Any]()
        self.captures, self.capturing, self.warming = 0, False, False
        self.streams = 0  # that were asked for
        self._pinned = dict[int, Tensor]()  # by `id`, and held: tensors compare element by element

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given, name = dict(kwargs or {}), func._schema.name
        tensors = [x for x in tree_leaves([args, given]) if isinstance(x, Tensor)]
        if name in _COPIES:
            return self._copied(func, args, given)
        if any(x.device == DEVICE for x in tensors):
            masked = name in _INDEXED and any(x.dtype == torch.bool for x in tree_leaves(args[1]) if x is not None)
            assert name not in _WAIT and not masked, f"{name} waits for the device"
            of_both = [(x.device.type, tuple(x.shape)) for x in tensors]
            # Numbers of no dimension go along with a launch.
            assert all(x.device == DEVICE or not x.dim() for x in tensors), f"{name} of {of_both}"
            self.called.append(name.removeprefix("aten::"))
        return func(*args, **given)

    def _copied(self, func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> Any:
        into = func._schema.name == "aten::copy_"
        source: Tensor = args[1] if into else args[0]
        device = args[0].device if into else torch.device(given.get("device") or source.device)
        if source.device == device:
            return func(*args, **given)
        way = f"a copy from {source.device} to {device}"
        assert not self.capturing, f"{way} within a capture"
        host = source if device == DEVICE else args[0]
        if not self.warming:
            assert given.get("non_blocking") or (into and len(args) > 2 and args[2]), f"{way} waits"
            assert id(host) in self._pinned, f"{way}, and not of pinned memory"
        if into:
            return args[0]  # there is no such copy in a PyTorch without CUDA
        dtype = given.get("dtype") or source.dtype
        return torch.empty_strided(source.shape, source.stride(), dtype=dtype, device=device)

    def pinned(self, x: Tensor, device: torch.device) -> Tensor:
        """In place of `transfer.pinned`."""
        assert x.device.type == "cpu"
        if device.type == "cpu":
            return x
        found = x if isinstance(x, FakeTensor) else self.mode.from_tensor(x)
        self._pinned[id(found)] = found
        return found

    def empty(self, *sizes: Any, pin_memory: bool = False, **given: Any) -> Tensor:
        """In place of `torch.empty`."""
        found = _EMPTY(*sizes, **given)
        if pin_memory:
            self._pinned[id(found)] = found
        return found

    def launch(self, kernel: Any, *args: Any, grid: Sequence[int], warmup: bool, **given: Any) -> None:
        """In place of what launches a kernel."""
        name = kernel.fn.__name__
        for x in (*args, *given.values()):
            assert not isinstance(x, Tensor) or x.device == DEVICE, f"{name} is given a tensor of {x.device}"
        assert "enable_fp_fusion" in given, f"{name} leaves open how it rounds: Triton's default is about to change"
        assert all(type(n) is int and n >= 0 for n in grid) and max(grid[1:], default=1) <= MAX_PROGRAMS, (name, grid)
        if all(grid):  # Triton launches nothing of no programs (its driver.c, as of 3.6 and 3.9)
            self.launched.append(name)
        if isinstance(kernel, JITFunction):
            pointers = [Pointer(x) if isinstance(x, Tensor) else x for x in args]
            driver.set_active(FakeDriver())
            self.specialised.add((name, _specialisation(kernel, pointers, given)))
            self.kernels.add(kernel)
            if self.compiles:
                RUN(kernel, *pointers, grid=grid, warmup=True, **given)

    def stream(self, device: object) -> SimpleNamespace:
        """In place of `torch.cuda.Stream`."""
        self.streams += 1
        return SimpleNamespace(wait_stream=lambda other: None)

    @contextmanager
    def graph(
        self, graph: object, pool: object, stream: object, capture_error_mode: str
    ) -> Iterator[None]:  # fmt: skip
        """In place of `torch.cuda.graph`."""
        assert capture_error_mode == "thread_local", "another thread's first kernel would end it"
        assert stream is not None, "PyTorch's own is of the device that met the first capture"
        assert not self.capturing
        self.capturing, self.captures = True, self.captures + 1
        yield
        self.capturing = False


class FakeDriver:
    """What Triton asks before a launch."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Pointer:
    """As a launch sees a tensor: memory begins at a multiple of 16."""

    def __init__(self, x: Tensor) -> None:
        self.dtype, self._at = x.dtype, int(16 + x.storage_offset() * x.itemsize)

    def data_ptr(self) -> int:
        return self._at


def _specialisation(kernel: Any, args: Sequence[Any], given: Mapping[str, Any]) -> str:
    """Of each argument that is no constant: its type, and what is known of it."""
    binder = kernel.device_caches[0][-1]
    _, specialised, _ = binder(*args, **OPTIONS, **given)
    return str([one for one in specialised if one[0] != "constexpr"])


RUN = JITFunction.run
_EMPTY = torch.empty
OPTIONS = {"debug": False, "instrumentation_mode": ""}


@contextmanager
def on_fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """An H200, as PyTorch tells of it."""
    device = FakeCuda()
    told = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    instead: dict[str, Any] = {
        "init": lambda: None, "get_device_properties": lambda of: told, "graph_pool_handle": lambda: (0, 1),
        "device": lambda of: nullcontext(), "Event": lambda: event, "Stream": device.stream,
        "current_stream": lambda of: stream, "stream": lambda of: nullcontext(), "graph": device.graph,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: device.launched.append("replay")),
    }  # fmt: skip
    for name, value in instead.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for kind in (InterpretedFunction, JITFunction):
        monkeypatch.setattr(kind, "run", lambda kernel, *args, **given: device.launch(kernel, *args, **given))
    for module in (host_device_copy, cuda_graphs):
        monkeypatch.setattr(module, "pinned", device.pinned)
    monkeypatch.setattr(torch, "empty", device.empty)
    monkeypatch.setattr(
        torch, "inference_mode", nullcontext
    )  # within it operators come here before they are taken apart
    coded._matrix.cache_clear()  # what one device has is none of another's
    with _guarded(), device.mode, device:
        yield device
    coded._matrix.cache_clear()


@contextmanager
def _guarded() -> Iterator[None]:
    """A PyTorch without CUDA has nothing that makes such a device the current one; what does so for tensors of `meta`,
    which is nothing, stands in. Its table is no part of PyTorch's interface (c10/core/impl/DeviceGuardImplInterface.h).
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
    table = (ctypes.c_void_p * (_META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = table[_CUDA]
    table[_CUDA] = before or table[_META]
    try:
        yield
    finally:
        table[_CUDA] = before


def loaded_there(like: Loaded) -> Loaded:
    codes = {node: tuple(map(_rows_there, found)) for node, found in like.coded.items()}
    return Loaded({value: _there(x) for value, x in like.tensors.items()}, codes)


def _rows_there(w: QuantizedRows) -> QuantizedRows:
    least = None if w.minimums is None else _there(w.minimums)
    return QuantizedRows(_there(w.codes), _there(w.scales), w.width, w.group, least, w.zero)


def _there(x: Tensor) -> Tensor:
    """Like it, on the device."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE)


def executor_like(
    other: CudaExecutor, limits: ExecutorLimits, buckets: Sequence[int], loaded: Callable[[], object] = lambda: None
) -> CudaExecutor:  # fmt: skip
    """On the device that is there, with weights like those of another. other: of a CPU; loaded: told of them"""

    def load(*_: object) -> Loaded:
        loaded()
        return loaded_there(other._loaded)

    return CudaExecutor(other._lowered, limits, kv=other._kv_format, buckets=buckets, device=str(DEVICE), load=load)
