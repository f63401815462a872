"""The example compiles, and computes what its model says: checked against the same model in plain NumPy float64."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from millrace.kernels.attention.ref import attention
from millrace.kernels.rms_norm.ref import rms_norm

ROOT = Path(__file__).parents[2]


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_model", ROOT / "examples" / "own_model.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def next_byte(weights: dict[str, np.ndarray], tokens: list[int], heads: int, size: int) -> int:
    """Greedy, in float64, without the compiler."""
    w = {name: a.astype(np.float64) for name, a in weights.items()}
    x = w["embed.weight"][tokens]
    for i in range(2):
        p = {name.split(".", 2)[2]: a for name, a in w.items() if name.startswith(f"layers.{i}.")}
        y = rms_norm(x, p["norm.weight"], 1e-5)
        q, k, v = (np.reshape(y @ p[f"{n}.weight"].T, (len(tokens), heads, size)) for n in "qkv")
        x = x + attention(q, k, v, 0, size**-0.5).reshape(len(tokens), -1) @ p["out.weight"].T
        up = np.maximum(rms_norm(x, p["mlp_norm.weight"], 1e-5) @ p["up.weight"].T, 0)
        x = x + up**2 @ p["down.weight"].T
    return int((rms_norm(x[-1:], w["norm.weight"], 1e-5) @ w["head.weight"].T).argmax())


def test_it_computes_what_it_says(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    caught = {}
    plain = example.Source.from_module

    def catching(model: object, weights: dict[str, np.ndarray], max_context: int) -> object:
        caught.update(weights)
        return plain(model, weights, max_context)

    monkeypatch.setattr(example.Source, "from_module", catching)
    params = example.SamplingParams
    monkeypatch.setattr(example, "SamplingParams", lambda **_: params(max_tokens=12, temperature=0))
    answer = example.main("fp32")
    tokens = list(b"Hello, ")
    for token in answer:
        assert token == next_byte(caught, tokens, example.HEADS, example.SIZE)
        tokens.append(token)


@pytest.mark.parametrize("precision", ["bf16", "w8a8", "w4a8"])
def test_every_precision_runs(example: ModuleType, precision: str) -> None:
    assert len(example.main(precision)) == 24
