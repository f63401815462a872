"""A small convolutional network written as a Module, beside PyTorch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.lower_cpu.program import Bounds
from millrace.compile.precision import precision_map
from millrace.compile.source import Source
from millrace.engine.artifact.engine import Engine
from millrace.errors import GraphError
from millrace.kernels.library import usable_isas
from millrace.model import ops
from millrace.model.layers import BatchNorm2d, Conv2d, Linear
from millrace.model.module import Module, Signature
from millrace.model.tensor import Tensor

IMAGES = {"images": Bounds(1, 4, 9)}


class SmallNetwork(Module):
    """Convolutions with stride, groups and dilation, batch norm, ReLU, both poolings, a residual, a linear head."""

    signature = Signature({"pixels": ("images", 3, 29, 22)}, ("scores",))

    def __init__(self) -> None:
        self.stem, self.norm = Conv2d(3, 20, 5, stride=2, padding=2, bias=False), BatchNorm2d(20)
        self.depth = Conv2d(20, 20, 3, padding=(2, 1), dilation=(2, 1), groups=20)
        self.pair = Conv2d(20, 34, (1, 3), groups=2)
        self.norm2 = BatchNorm2d(34, 1e-3)
        self.head = Linear(34 * 2 * 2, 10, bias=True)

    def forward(self, pixels: Tensor) -> Tensor:
        x = ops.relu(self.norm(self.stem(pixels)))  # (N, 20, 15, 11)
        x = x + self.depth(x)
        x = ops.max_pool(x, 3, stride=2, padding=1)  # (N, 20, 8, 6)
        x = ops.relu(self.norm2(self.pair(x)))  # (N, 34, 8, 4)
        x = ops.avg_pool(x, (4, 2))  # (N, 34, 2, 2)
        return self.head(x.reshape(x.shape[0], 34 * 2 * 2))


class Theirs(nn.Module):  # type: ignore[misc]  # torch has no types here
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 20, 5, stride=2, padding=2, bias=False), nn.BatchNorm2d(20)
        self.depth = nn.Conv2d(20, 20, 3, padding=(2, 1), dilation=(2, 1), groups=20)
        self.pair, self.norm2 = nn.Conv2d(20, 34, (1, 3), groups=2), nn.BatchNorm2d(34, 1e-3)
        self.head = nn.Linear(34 * 2 * 2, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm(self.stem(pixels)))
        x = x + self.depth(x)
        x = functional.max_pool2d(x, 3, 2, 1)
        x = functional.relu(self.norm2(self.pair(x)))
        found: torch.Tensor = self.head(functional.avg_pool2d(x, (4, 2)).flatten(1))
        return found


@pytest.fixture(scope="module")
def theirs() -> Theirs:
    torch.manual_seed(3)
    model = Theirs()
    model.eval()
    for norm in (model.norm, model.norm2):
        for tensor, low in ((norm.running_mean, -0.5), (norm.running_var, 0.3), (norm.weight.data, 0.5)):
            tensor.uniform_(low, low + 1)
    return model


def engine_of(model: Module, weights: dict[str, Any], out: Path, precision: str = "fp32") -> Engine:
    source = Source.from_module(model, weights)
    options = BuildOptions(precision=precision_map(precision, 32), profile=IMAGES)
    write_engine(source, plan_engine(source, options), out, name="cnn")
    return Engine.open(out)


def weights_of(model: nn.Module) -> dict[str, Any]:
    return {name: t.numpy() for name, t in model.state_dict().items() if "num_batches" not in name}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_as_pytorch(theirs: Theirs, tmp_path: Path, precision: str) -> None:
    """Within 1e-5 relative in float32; an image's bits depend on it alone, on every instruction set."""
    engine = engine_of(SmallNetwork(), weights_of(theirs), tmp_path / "e", precision)
    pixels = np.random.default_rng(1).standard_normal((9, 3, 29, 22)).astype(np.float32)
    with torch.no_grad():
        expected = theirs.double()(torch.from_numpy(pixels).double()).numpy()
    theirs.float()
    seen = set()
    for isa in usable_isas():
        for threads in (1, 2):
            loaded = engine.stateless_executor(isa=isa, threads=threads)
            scores = loaded.run({"pixels": pixels})["scores"]
            for n in (1, 4):
                assert (loaded.run({"pixels": pixels[:n]})["scores"] == scores[:n]).all()
            loaded.close()
            seen.add(scores.tobytes())
            limit = 1e-5 if precision == "fp32" else 1e-2
            assert np.abs(np.asarray(scores, np.float64) - expected).max() < limit * np.abs(expected).max()
    assert len(seen) == 1, "bits differ by instruction set or threads"


SHAPES: list[dict[str, Any]] = [
    {"kernel": 1}, {"kernel": 3, "padding": 1}, {"kernel": (5, 2), "stride": (2, 3), "padding": (2, 1)},
    {"kernel": 3, "dilation": 3, "padding": 3}, {"kernel": 3, "groups": 4}, {"kernel": 2, "groups": 8, "stride": 2},
    {"kernel": (9, 7)},
]  # fmt: skip


@pytest.mark.parametrize("options", SHAPES)
def test_convolutions_as_pytorch(options: dict[str, Any], tmp_path: Path) -> None:
    """Integers small enough that every sum is exact."""
    kernel, more = options["kernel"], {k: v for k, v in options.items() if k != "kernel"}

    class One(Module):
        signature = Signature({"x": ("images", 8, 9, 7)}, ("y",))

        def __init__(self) -> None:
            self.conv = Conv2d(8, 24, kernel, **more)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x)

    torch.manual_seed(1)
    conv = nn.Conv2d(8, 24, kernel, **more)
    with torch.no_grad():
        for p in conv.parameters():
            p.copy_(torch.randint(-4, 5, p.shape).float())
        x = torch.randint(-4, 5, (3, 8, 9, 7)).float()
        expected = conv(x).numpy()
    engine = engine_of(One(), {f"conv.{k}": v.detach().numpy() for k, v in conv.named_parameters()}, tmp_path / "e")
    loaded = engine.stateless_executor()
    np.testing.assert_array_equal(loaded.run({"x": x.numpy()})["y"], expected)
    loaded.close()


@pytest.mark.parametrize(("kind", "options"), [
    ("max", {"kernel": 2}), ("max", {"kernel": 3, "stride": 2, "padding": 1}), ("max", {"kernel": (9, 1), "stride": 1}),
    ("mean", {"kernel": (2, 3)}), ("mean", {"kernel": 3, "stride": 1, "padding": 1}),
    ("mean", {"kernel": 3, "padding": 1, "count_include_pad": False}), ("mean", {"kernel": (9, 7)}),
])  # fmt: skip
def test_pooling_as_pytorch(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    class One(Module):
        signature = Signature({"x": ("images", 5, 9, 7)}, ("y",))

        def forward(self, x: Tensor) -> Tensor:
            return ops.max_pool(x, **options) if kind == "max" else ops.avg_pool(x, **options)

    x = torch.randn(3, 5, 9, 7, generator=torch.Generator().manual_seed(1))
    theirs = {name.replace("kernel", "kernel_size"): value for name, value in options.items()}
    expected = (functional.max_pool2d if kind == "max" else functional.avg_pool2d)(x, **theirs)
    loaded = engine_of(One(), {}, tmp_path / "e").stateless_executor()
    found: Any = loaded.run({"x": x.numpy()})["y"]
    np.testing.assert_allclose(found, expected.numpy(), rtol=2e-6, atol=1e-6)
    loaded.close()


@pytest.mark.parametrize(("options", "why"), [
    ({"kernel": 10}, "a kernel that fits into the padded input"), ({"kernel": 3, "stride": 0}, "1, 0 and 1 at least"),
    ({"kernel": 3, "groups": 3}, "groups"), ({"kernel": 3, "padding": -1}, "1, 0 and 1 at least"),
])  # fmt: skip
def test_what_no_convolution_takes(options: dict[str, Any], why: str, tmp_path: Path) -> None:
    class One(Module):
        signature = Signature({"x": ("images", 8, 9, 7)}, ("y",))

        def __init__(self) -> None:
            self.conv = Conv2d(8, 24, **options)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x)

    weights = {name: np.zeros([d for d in p.shape if isinstance(d, int)], np.float32) for name, p in One().parameters()}
    with pytest.raises(GraphError, match=why):
        engine_of(One(), weights, tmp_path / "e")
