"""Networks of PyTorch in a model repository: one of a layer, how it is saved, and what it computes."""

import io
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millrace.model_repository.request.tensors import Array

CONFIG = """platform: "pytorch_libtorch" max_batch_size: 8
input { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 16 ] }
output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 10 ] }
"""


class Dense(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 10)
        with torch.no_grad():
            drawn = np.random.default_rng(0).standard_normal((10, 16)).astype(np.float32)
            self.layer.weight.copy_(torch.from_numpy(drawn))
            self.layer.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x))


def write(root: Path, name: str, save: Callable[[Path], object], config: str = CONFIG, file: str = "model.pt") -> Path:
    (root / name / "1").mkdir(parents=True)
    save(root / name / "1" / file)
    (root / name / "config.pbtxt").write_text(config)
    return root


def scripted(module: torch.nn.Module) -> Callable[[Path], object]:
    return lambda path: torch.jit.save(torch.jit.script(module), path)


def exported(module: torch.nn.Module, *example: torch.Tensor, **said: Any) -> Callable[[Path], object]:
    """Whose first dimensions vary together."""
    n = torch.export.Dim("n")
    program = torch.export.export(module, example, dynamic_shapes=[{0: n}] * len(example), **said)

    def save(path: Path) -> None:
        with path.open("wb") as opened:  # a name that ends in .pt is a warning
            torch.export.save(program, opened)

    return save


def exported_dense(path: Path) -> None:
    """`Dense` by torch.export, which traces it once for all tests."""
    path.write_bytes(_dense())


@cache
def _dense() -> bytes:
    file, n = io.BytesIO(), torch.export.Dim("n")
    torch.export.save(torch.export.export(Dense(), (torch.ones(2, 16),), dynamic_shapes=[{0: n}]), file)
    return file.getvalue()


def exact(x: Array) -> Array:
    found: Array = np.maximum(x.astype(np.float64) @ Dense().layer.weight.detach().numpy().T, 0)
    return found
