"""Other engines on a real model's weights, made as they are for the races of random ones: what their answers are worth.

Each is one of the catalogue's (`benchmarks/peers/engine.py`), by its name there: llama.cpp's own quantiser writes its
files from the float32 of a GGUF file's weights, OpenVINO's model is written from the same. Where a row does not divide
into a kind's blocks, theirs or ours fall back, and the result names what most weights are.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks.paces import Timed
from benchmarks.peers.workloads import Phase, Workload
from millrace.engine.executor import IntArray
from millrace.evaluate.divergence import LogProbs, Reader, log_softmax
from millrace.machine.cpu import usable_cores

if TYPE_CHECKING:
    from benchmarks.peers.weights import NamedWeights


class Loaded(NamedTuple):
    """An engine: in which numbers it computes, how it reads, and itself, to be timed."""

    numbers: dict[str, str]
    read: Reader
    engine: Timed | None  # None: it is not timed here


Opening = Callable[[int], AbstractContextManager[Loaded]]  # for sequences of at most so many tokens
LLAMA_CPP = {
    "llama.cpp-q4_0": "Q4_0", "llama.cpp-q4_0-head8": "Q4_0+Q8_0", "llama.cpp-q4_k_m": "Q4_K_M",
    "llama.cpp-q8_0": "Q8_0", "llama.cpp-bf16": "BF16",
}  # fmt: skip
# Kind of weights, and the activations: OpenVINO's precision hint and the group of its dynamic quantisation.
OPENVINO = {
    "openvino-int4-a128": ("int4", 128), "openvino-int4-asym-a128": ("int4-asym", 128),
    "openvino-int4": ("int4", None), "openvino-int4-asym": ("int4-asym", None),
}  # fmt: skip


@contextmanager
def recipes(path: Path) -> Iterator[Mapping[str, Opening]]:
    """By the catalogue's names, of what is installed; their files are gone when the block ends. path: a GGUF file"""
    with TemporaryDirectory() as temporary:
        made: dict[str, Opening] = {}
        if find_spec("llama_cpp") is not None and find_spec("gguf") is not None:
            made.update(_llama_cpps(path, Path(temporary)))
        if find_spec("openvino") is not None:
            made.update(_openvinos(path, Path(temporary)))
        yield made


def _llama_cpps(path: Path, folder: Path) -> Iterator[tuple[str, Opening]]:
    from benchmarks.peers.gguf_file import quantise

    plain = folder / "f32.gguf"
    quantise(path, plain, "F32")
    for name, kind in LLAMA_CPP.items():
        out = folder / f"{name}.gguf"
        quantise(plain, out, kind)
        yield name, partial(llama_cpps, out)


def _openvinos(path: Path, folder: Path) -> Iterator[tuple[str, Opening]]:
    from benchmarks.peers.openvino_ir import write_ir
    from benchmarks.peers.weights import NamedWeights

    weights = NamedWeights.named(str(path))
    for name, (kind, group) in OPENVINO.items():
        out = folder / f"{kind}.xml"
        if not out.exists():
            write_ir(out, weights, kind, every_token=True)
        yield name, partial(_openvino, out, weights, group)


@contextmanager
def llama_cpps(path: Path, longest: int, cache: int | None = None) -> Iterator[Loaded]:
    """llama.cpp on a GGUF file; gone when the block ends.

    cache: the type of keys and values as of LlamaCppEngine; where it is said, attention is not fused
    """
    from benchmarks.peers.llama_cpp_engine import LlamaCppEngine, Tried, batches

    engine = LlamaCppEngine(path, usable_cores(), cache)
    size = Workload(Phase.PREFILL, users=1, prompt=longest, new=0)
    context, described = engine.context(size, Tried(flash=cache is None)), engine.describe()

    def read(ids: IntArray, first: int) -> LogProbs:
        context.keep(1, 0)
        n = len(ids) - 1
        with batches([[(int(token), at, 0, at >= first) for at, token in enumerate(ids[:-1])]]) as steps:
            context.decode(steps)
        return log_softmax(np.stack([context.logits(at, engine.vocab) for at in range(first, n)]))

    numbers = {key: str(getattr(described, key)) for key in ("weights", "activations", "head", "kv")}
    yield Loaded(numbers, read, engine)
    context.close()
    engine.close()


@contextmanager
def _openvino(path: Path, weights: "NamedWeights", group: int | None, _: int) -> Iterator[Loaded]:
    """path: of a model that gives the logits of every token. group: of activations in 8 bits; None: in bfloat16"""
    from benchmarks.peers.openvino_engine import OpenVinoEngine, Setting
    from benchmarks.peers.openvino_ir import group_of

    engine = OpenVinoEngine(path, weights.config, usable_cores(), group)
    setting = Setting("f32", group) if group else Setting("bf16", group_of(weights.config.hidden_size))
    model, described = engine.compiled(setting), engine.describe()

    def read(ids: IntArray, first: int) -> LogProbs:
        model.reset()
        return log_softmax(model.logits(np.asarray(ids[None, :-1], np.int64), 0)[0, first:])

    numbers = {key: str(getattr(described, key)) for key in ("weights", "head", "kv")}
    yield Loaded({**numbers, "activations": setting.told}, read, None)
