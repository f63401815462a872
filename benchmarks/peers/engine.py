"""What every engine must be able to do here, ours included, and the catalogue of those that are compared."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.weights import NamedWeights
from benchmarks.peers.workloads import Workload


@dataclass(frozen=True, slots=True)
class Description:
    """What was measured: of which version, in which numbers, how its weights lie in memory, how it was set up."""

    version: str
    weights: str
    activations: str
    head: str
    kv: str
    weights_bytes: int
    read_bytes_per_step: int
    attention: str = ""  # where its sums are not the plain ones
    settings: dict[str, Any] = field(default_factory=dict)


Floats = NDArray[np.float32]


class Engine(Protocol):
    """Loaded and ready; it keeps its weights and its threads until its process ends."""

    def describe(self) -> Description:
        """Asked at the end, when all choices have been made."""
        ...

    def warm_up(self, workload: Workload) -> None:
        """Anything that may be slow once: buffers, just-in-time code, the choice of the fastest setting."""
        ...

    def run(self, workload: Workload) -> float:
        """Seconds of the part that counts."""
        ...

    def logits(self, prompt: Sequence[int]) -> Floats:
        """(vocabulary) behind the last token of one user's prompt: who is fast must have computed the model, too."""
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the catalogue. `module` has `load(weights, variant, folder, threads) -> Engine`."""

    module: str
    variant: str
    packages: tuple[str, ...]  # what must be importable
    precision: str  # of its arithmetic: "int8" or "bf16", to be compared with that peak of the machine
    library: str = ""  # names a variable of the environment with the folder of the libraries that its package must take

    def missing(self) -> list[str]:
        missing = [f"{p} (pip install 'millrace[{EXTRA}]')" for p in self.packages if find_spec(p) is None]
        if self.library and not Path(os.environ.get(self.library, "-")).is_dir():
            missing.append(f"a folder in the variable {self.library} (benchmarks/peers/llama_cpp_engine.py says which)")
        return missing

    def environment(self) -> dict[str, str]:
        """What its process gets beside the variables of this one: glibc asks for huge pages, as our engines do."""
        own = {"LLAMA_CPP_LIB_PATH": os.environ[self.library]} if self.library else {}
        return {**own, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

    def load(self, weights: NamedWeights, folder: Path, threads: int) -> Engine:
        engine: Engine = import_module(f"benchmarks.peers.{self.module}").load(weights, self.variant, folder, threads)
        return engine


EXTRA = "peers"
_LLAMA = ("llama_cpp", "gguf")
# a128: int8 activations in groups of 128, as ours have them, where the engine would take others.
# generate: with scheduling, sampling and text, as users of `LLM.generate` see it; the others are driven step by step.
# head4: with a head of four bits, whose best are computed again in eight, as ours was before it kept the distribution.
# head8: with a head of eight bits, as ours and OpenVINO's have it; llama.cpp's own choice is Q6_K.
# "stored" and "file": the GGUF file that --model names, as `millrace serve` and llama.cpp run it unasked.
CATALOGUE = {
    "millrace": Entry("millrace_engine", "stored", (), "int8"),
    "llama.cpp": Entry("llama_cpp_engine", "file", _LLAMA, "int8"),
    "millrace-w4a8": Entry("millrace_engine", "w4a8", (), "int8"),
    "millrace-w4a8-head4": Entry("millrace_engine", "w4a8/w4a8", (), "int8"),
    "millrace-w4a8-generate": Entry("millrace_engine", "w4a8+generate", (), "int8"),
    "llama.cpp-q4_0": Entry("llama_cpp_engine", "Q4_0", _LLAMA, "int8"),
    "llama.cpp-q4_0-head8": Entry("llama_cpp_engine", "Q4_0+Q8_0", _LLAMA, "int8"),
    "llama.cpp-q4_k_m": Entry("llama_cpp_engine", "Q4_K_M", _LLAMA, "int8"),
    "openvino-int4": Entry("openvino_engine", "int4", ("openvino",), "int8"),
    "openvino-int4-asym": Entry("openvino_engine", "int4-asym", ("openvino",), "int8"),
    "openvino-int4-a128": Entry("openvino_engine", "int4@128", ("openvino",), "int8"),
    "openvino-int4-asym-a128": Entry("openvino_engine", "int4-asym@128", ("openvino",), "int8"),
    "millrace-w8a8": Entry("millrace_engine", "w8a8", (), "int8"),
    "llama.cpp-q8_0": Entry("llama_cpp_engine", "Q8_0", _LLAMA, "int8"),
    "millrace-bf16": Entry("millrace_engine", "bf16", (), "bf16"),
    "llama.cpp-bf16": Entry("llama_cpp_engine", "BF16", _LLAMA, "bf16"),
    "transformers-bf16": Entry("transformers_engine", "bf16", ("torch", "transformers"), "bf16"),
    "millrace-w4a8-avx2": Entry("millrace_engine", "w4a8@avx2", (), "int8"),
    "llama.cpp-q4_0-avx2": Entry("llama_cpp_engine", "Q4_0", _LLAMA, "int8", library="LLAMA_CPP_AVX2"),
}
