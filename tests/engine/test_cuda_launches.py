"""What a step launches on a GPU, counted on tensors of this CPU, so that nobody adds a kernel to a layer unseen.

docs/gpu.md has the numbers.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from benchmarks.gpu.model import TINY, graph_of, lowered_graph
from millrace.engine.cache_specs import KvFormat
from millrace.engine.cuda.executor import CudaExecutor
from millrace.engine.cuda.sampling import SamplingMode
from millrace.engine.dummy_step import dummy_step
from millrace.kernels import torch_reference
from tests.engine.test_cuda import LIMITS
from tests.support.one_step import i32

OURS = (
    "add_norm",
    "attention",
    "argmax",
    "coded_rows",
    "draw",
    "keep_rotated",
    "product",
    "scatter_tokens",
    "rms_norm",
    "silu_mul",
)
NO_KERNEL = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "alias", "lift_fresh")


def memory(x: Any) -> set[int]:
    """Where its tensors lie."""
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(x) if isinstance(leaf, torch.Tensor)}


class Launches(TorchDispatchMode):  # type: ignore[misc]
    """In their order: what PyTorch computes or copies, by its own names, and our kernels by theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        name, given = func.overloadpacket.__name__, memory(args)
        found = func(*args, **(kwargs or {}))
        if name not in NO_KERNEL and not (func.is_view and memory(found) <= given):
            self.seen.append(name)
        return found

    def kernels(self) -> SimpleNamespace:
        """Of which each is one launch, but for attention in parts, which another merges."""

        def counted(name: str) -> Any:
            def kernel(*args: Any, **more: Any) -> Any:
                self.seen.append(name)
                with _disable_current_modes():
                    return getattr(torch_reference, name)(*args, **more)

            return kernel

        return SimpleNamespace(**{name: counted(name) for name in OURS})


def executor(precision: str, layers: int) -> CudaExecutor:
    graph = graph_of(replace(TINY, n_layers=layers, max_context=256), precision)
    limits = replace(LIMITS, vocab_size=graph.outputs[0].value.width)
    kv = KvFormat.FP8 if precision == "fp8" else None
    return CudaExecutor(lowered_graph(graph, precision), limits, kv=kv, buckets=(4,), device="cpu")


def launched(precision: str, layers: int, step: Callable[[CudaExecutor], Callable[[], object]]) -> list[str]:
    ours, seen = executor(precision, layers), Launches()
    run = step(ours)
    run()
    ours._kernels = seen.kernels()  # type: ignore[assignment]
    with torch.inference_mode(), seen:
        run()
    return seen.seen


def replay(ours: CudaExecutor) -> Callable[[], object]:
    """Of a decode step of four, its draws included."""
    ours.run(dummy_step([1] * 4, 0, 4, vocab=ours.limits.vocab_size))
    return ours._replays[4, SamplingMode.LIKELIEST]


def mixed(ours: CudaExecutor) -> Callable[[], object]:
    """A chunk of a prompt beside two that decode, draws included."""
    step = dummy_step([9, 1, 1], 0, 3, vocab=ours.limits.vocab_size)
    return lambda: ours._sample_eager(step, SamplingMode.LIKELIEST)


EIGHT_BITS = ["coded_rows"]  # of what attention gives; other rows are made so by the kernels before
BEGINS, ENDS = ["embedding", "to"], ["add", "index", "rms_norm", "product", "argmax"]


@pytest.mark.parametrize("step", [replay, mixed])
@pytest.mark.parametrize(("precision", "coded"), [
    ("bf16", []), ("w4a16", []), ("w8a16", []), ("fp8", EIGHT_BITS), ("w8a8", EIGHT_BITS),
])  # fmt: skip
def test_a_layer_is_so_many_launches(precision: str, coded: list[str], step: Any) -> None:
    """One after another in two layers; each layer more is as many again."""
    attends = ["product", "keep_rotated", "attention", *coded, "product"]
    layer = [*attends, "add_norm", "product", "silu_mul", "product"]
    two = [*BEGINS, "rms_norm", *coded, *layer, "add_norm", *layer, *ENDS]
    assert launched(precision, 2, step) == two
    assert len(launched(precision, 3, step)) - len(two) == 9 + len(coded)


def test_what_is_under_way_is_one_launch_more() -> None:
    """Tokens that the step before draws are put in by one kernel, beside the copies of tables."""

    def behind(ours: CudaExecutor) -> Callable[[], object]:
        first = dummy_step([1] * 4, 0, 4, vocab=ours.limits.vocab_size)
        ours.run(first)
        step = replace(first, pending_tokens=i32([[0, 1], [2, 3]]))
        return lambda: ours.run(step)

    seen = launched("bf16", 1, behind)
    assert seen.count("scatter_tokens") == 1 and not {"index_copy", "index_copy_", "clone", "clamp"} & set(seen)
