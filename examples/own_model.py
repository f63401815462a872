"""A new activation and a new architecture, from outside the package: written, compiled and run like the built-in ones.

    python examples/own_model.py

The model reads bytes (a vocabulary of 256), has two layers, and ReLU squared (arXiv:2109.08668), which Millrace
does not know. Its weights are random, so it babbles; with trained ones it would talk.

T tokens of a step, H heads, D head size.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from millrace.api.offline_generate import generate
from millrace.checkpoint.tokenizer.tokenizer import SpecialTokens, Tokenizer
from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.precision import precision_map
from millrace.compile.source import Source
from millrace.engine.artifact.engine import Engine
from millrace.model import ops
from millrace.model.layers import Embedding, Linear, RMSNorm
from millrace.model.module import DECODER, Module, ModuleList
from millrace.model.tensor import Tensor
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.sampling_params import SamplingParams

WIDTH, HEADS, SIZE, LAYERS, CONTEXT = 64, 4, 16, 2, 256


def relu_squared(x: Tensor) -> Tensor:
    """A new operator is a function on tensors; the compiler fuses it into one kernel."""
    r = ops.relu(x)
    return r * r


class Layer(Module):
    """Attention without positions, and a plain MLP with our activation."""

    def __init__(self) -> None:
        self.norm = RMSNorm(WIDTH, 1e-5)
        self.q, self.k, self.v = (Linear(WIDTH, HEADS * SIZE) for _ in range(3))
        self.out = Linear(HEADS * SIZE, WIDTH)
        self.mlp_norm = RMSNorm(WIDTH, 1e-5)
        self.up, self.down = Linear(WIDTH, 4 * WIDTH), Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
        T = x.shape[0]
        y = self.norm(x)
        q, k, v = (p(y).reshape(T, HEADS, SIZE) for p in (self.q, self.k, self.v))  # each (T, H, D)
        x = x + self.out(ops.attention(q, k, v, positions, lengths).reshape(T, HEADS * SIZE))
        return x + self.down(relu_squared(self.up(self.mlp_norm(x))))


class Babbler(Module):
    signature = DECODER

    def __init__(self) -> None:
        self.embed = Embedding(256, WIDTH)
        self.layers = ModuleList([Layer() for _ in range(LAYERS)])
        self.norm = RMSNorm(WIDTH, 1e-5)
        self.head = Linear(WIDTH, 256)

    def forward(self, tokens: Tensor, positions: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, positions, lengths)
        return self.head(ops.gather_rows(self.norm(x), rows))


class Bytes(Tokenizer):
    """Token i is the byte i."""

    def __init__(self) -> None:
        super().__init__(256, SpecialTokens(named={}, bos_token_id=None, eos_token_id=None, ids=frozenset()))

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def _token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def _first_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def main(precision: str = "fp32") -> list[int]:
    model = Babbler()
    rng = np.random.default_rng(0)
    shapes = {name: tuple(d for d in p.shape if isinstance(d, int)) for name, p in model.parameters()}
    weights = {name: rng.standard_normal(shape, np.float32) / np.sqrt(shape[-1]) for name, shape in shapes.items()}
    source = Source.from_module(model, weights, max_context=CONTEXT)
    plan = plan_engine(source, BuildOptions(precision=precision_map(precision), max_batch=4, max_step_tokens=64))
    with tempfile.TemporaryDirectory() as folder:
        manifest = write_engine(source, plan, Path(folder) / "babbler", name="babbler")
        print(f"{manifest.n_parameters:,} parameters in {manifest.cpu.n_calls} calls:")
        for call in plan.program.calls:
            print(f"  {call.kernel:12} {'+'.join(call.origin)}")
        executor = Engine.open(Path(folder) / "babbler").executor(n_pages=16)
    loop = EngineLoop(executor, Bytes())
    answer = generate(loop, ["Hello, "], SamplingParams(max_tokens=24, seed=7, temperature=0.8))[0].outputs[0]
    executor.close()
    print(f"it says: {answer.text!r}")
    return answer.token_ids


if __name__ == "__main__":
    main(*sys.argv[1:])
