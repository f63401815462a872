"""Every kernel that a step runs beside plain PyTorch, of the same inputs, one at a time: which one errs, and where."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.failures import FAILURES, traced
from millrace.engine.cuda.device_roofline import wait_for
from millrace.kernels import torch_reference, triton_kernels
from millrace.kernels.attention.paged import LayerPages
from millrace.kernels.matmul.coded import QuantizedRows

WRITES = {"keep_rotated": slice(3, 4), "scatter_tokens": slice(0, 1)}  # which of what they are given they write


class Watched:
    """In place of an executor's kernels. seen: of each by its name the call that was furthest apart, and its share of
    the largest number; what a kernel writes in place counts, too. An error says which kernel it is of, and its shapes.
    """

    def __init__(self, kernels: Any, device: torch.device, seen: dict[str, dict[str, Any]]) -> None:
        self.seen = seen
        self._kernels, self._device = kernels, device

    def kernels(self) -> SimpleNamespace:
        return SimpleNamespace(**{name: partial(self._both, name) for name in triton_kernels.__all__})

    def _both(self, name: str, *given: Any) -> Any:
        alike = deepcopy(given)
        shapes = ", ".join(_shapes(given))
        try:
            got = getattr(self._kernels, name)(*given)
            wait_for(self._device)  # or the error would be told of another
        except FAILURES as error:
            error.add_note(f"in {name} of {shapes}")
            raise
        try:
            found = self._apart(name, (got, given), alike)
        except FAILURES:  # of plain PyTorch, or of this: a step's logits say whether the kernel is right
            wait_for(self._device)
            self.seen[name] = {"apart": inf, "of": shapes, "traceback": traced()}
            return got
        if name not in self.seen or found > self.seen[name]["apart"]:
            self.seen[name] = {"apart": found, "of": shapes}
        return got

    def _apart(self, name: str, computed: tuple[Any, tuple[Any, ...]], alike: tuple[Any, ...]) -> float:
        got, given = computed
        want = getattr(torch_reference, name)(*alike)
        written = WRITES.get(name, slice(0))
        pairs = zip(_floats((got, given[written])), _floats((want, alike[written])), strict=True)
        return max((apart(a, b) for a, b in pairs), default=0.0)


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, by the largest number; inf where one is finite and the other is not."""
    if torch.equal(got, want):
        return 0.0
    finite = want.isfinite()
    if not torch.equal(finite, got.isfinite()):
        return inf
    if not finite.any():
        return 0.0
    got, want = got[finite].double(), want[finite].double()
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))


def _floats(x: Any) -> Iterator[Tensor]:
    """All numbers in it, as what they mean."""
    if isinstance(x, Tensor):
        yield x.float()
    elif isinstance(x, QuantizedRows):
        yield x.dense()
    elif isinstance(x, LayerPages):
        yield from x.floats(torch.arange(len(x.keys), device=x.keys.device))
    elif isinstance(x, tuple | list):
        for one in x:
            yield from _floats(one)


def _shapes(x: Any) -> Iterator[str]:
    if isinstance(x, Tensor):
        strides = "" if x.is_contiguous() else f", strides {tuple(x.stride())}"
        yield f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}{strides}"
    elif isinstance(x, tuple | list):
        for one in x:
            yield from _shapes(one)
    elif is_dataclass(x):
        for field in fields(x):
            yield from _shapes(getattr(x, field.name))
    elif isinstance(x, int | float | bool | torch.dtype):
        yield str(x)
