"""What every engine must be able to do here, ours included, and the catalogue of those that are compared."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.homes import HIDING, HOMES, home_folder
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
IntArray = NDArray[np.int32]


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


@runtime_checkable
class Reads(Protocol):
    """An engine whose answers can be compared token by token."""

    def read(self, ids: IntArray, first: int) -> Floats:
        """(n - 1 - first, vocabulary): log probabilities, as `millrace.evaluate.divergence` asks a reader for."""
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the catalogue. `module` has `load(weights, variant, folder, threads) -> Engine`; it may also have
    `prepare(weights, variant, folder)`, which writes files and whose time does not count, and `environment(home)`.
    """

    module: str
    variant: str
    packages: tuple[str, ...]  # what must be importable
    precision: str  # of its arithmetic: "int8" or "bf16", to be compared with that peak of the machine
    library: str = ""  # names a variable of the environment with the folder of the libraries that its package must take
    home: str = ""  # the environment that has its packages, of `HOMES`; "" or not there: Millrace's own

    def python(self, work: Path, isa: str | None) -> Path | None:
        """The interpreter of its environment; None: Millrace's own. isa: the widest that may be used, None: all"""
        if not self.home or self.library:
            return None
        found = home_folder(work, self.home, isa) / "bin" / "python"
        return found if found.exists() else None

    def missing(self, work: Path, isa: str | None) -> list[str]:
        """What must be installed before it can run, and how."""
        if self.python(work, isa) is not None:
            return []
        how = f"pip install 'millrace[{EXTRA}]'"
        if self.home:
            hidden = f" --isa {isa}" if isa and HOMES[self.home].built else ""
            how = f"python -m benchmarks.peers.homes{hidden} {self.home}"
            if hidden and not self.library:  # the build in Millrace's own environment is for this processor
                return [f"an environment of its own ({how})"]
        missing = [f"{p} ({how})" for p in self.packages if find_spec(p) is None]
        if self.library and not Path(os.environ.get(self.library, "-")).is_dir():
            missing.append(f"a folder in the variable {self.library} (benchmarks/peers/llama_cpp_engine.py says which)")
        return missing

    def environment(self, work: Path, isa: str | None) -> dict[str, str]:
        """What its process gets beside the variables of this one: glibc asks for huge pages, as our engines do."""
        own = {"LLAMA_CPP_LIB_PATH": os.environ[self.library]} if self.library else {}
        python = self.python(work, isa)
        if python is not None and self.home == "vllm":
            own |= import_module(f"benchmarks.peers.{self.module}").environment(python.parents[1])
        return {**own, **(HIDING[isa] if isa else {}), "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

    def prepare(self, weights: NamedWeights, folder: Path) -> None:
        """Writes the files that it loads, where they are not there."""
        prepare = getattr(import_module(f"benchmarks.peers.{self.module}"), "prepare", None)
        if prepare is not None:
            prepare(weights, self.variant, folder)

    def load(self, weights: NamedWeights, folder: Path, threads: int) -> Engine:
        engine: Engine = import_module(f"benchmarks.peers.{self.module}").load(weights, self.variant, folder, threads)
        return engine


EXTRA = "peers"
_LLAMA = ("llama_cpp", "gguf")
_GENAI, _VLLM = ("openvino_genai",), ("vllm",)
# a128: int8 activations in groups of 128, as ours have them, where the engine would take others.
# generate: with scheduling, sampling and text, as users of `LLM.generate` see it; the others are driven step by step.
# head4: with a head of four bits, whose best are computed again in eight, as ours was before it kept the distribution.
# head8: with a head of eight bits, as ours and OpenVINO's have it; llama.cpp's own choice is Q6_K.
# "stored" and "file": the GGUF file that --model names, as `millrace serve` and llama.cpp run it unasked.
CATALOGUE = {
    "millrace": Entry("millrace_engine", "stored", (), "int8"),
    "millrace-generate": Entry("millrace_engine", "stored+generate", (), "int8"),
    "millrace-bf16-generate": Entry("millrace_engine", "bf16+generate", (), "bf16"),
    "millrace-fp32": Entry("millrace_engine", "fp32", (), "bf16"),
    "llama.cpp": Entry("llama_cpp_engine", "file", _LLAMA, "int8", home="llama.cpp"),
    "llama.cpp-f16": Entry("llama_cpp_engine", "F16", _LLAMA, "bf16", home="llama.cpp"),
    "openvino-genai": Entry("genai_engine", "file", _GENAI, "int8", home="openvino-genai"),
    "openvino-genai-q8_0": Entry("genai_engine", "Q8_0", _GENAI, "int8", home="openvino-genai"),
    "openvino-genai-f16": Entry("genai_engine", "F16", _GENAI, "bf16", home="openvino-genai"),
    "vllm-bf16": Entry("vllm_engine", "bf16", _VLLM, "bf16", home="vllm"),
    "vllm-fp32": Entry("vllm_engine", "fp32", _VLLM, "bf16", home="vllm"),
    "millrace-w4a8": Entry("millrace_engine", "w4a8", (), "int8"),
    "millrace-w4a8-head4": Entry("millrace_engine", "w4a8/w4a8", (), "int8"),
    "millrace-w4a8-generate": Entry("millrace_engine", "w4a8+generate", (), "int8"),
    "llama.cpp-q4_0": Entry("llama_cpp_engine", "Q4_0", _LLAMA, "int8", home="llama.cpp"),
    "llama.cpp-q4_0-head8": Entry("llama_cpp_engine", "Q4_0+Q8_0", _LLAMA, "int8", home="llama.cpp"),
    "llama.cpp-q4_k_m": Entry("llama_cpp_engine", "Q4_K_M", _LLAMA, "int8", home="llama.cpp"),
    "openvino-int4": Entry("openvino_engine", "int4", ("openvino",), "int8"),
    "openvino-int4-asym": Entry("openvino_engine", "int4-asym", ("openvino",), "int8"),
    "openvino-int4-a128": Entry("openvino_engine", "int4@128", ("openvino",), "int8"),
    "openvino-int4-asym-a128": Entry("openvino_engine", "int4-asym@128", ("openvino",), "int8"),
    "millrace-w8a8": Entry("millrace_engine", "w8a8", (), "int8"),
    "llama.cpp-q8_0": Entry("llama_cpp_engine", "Q8_0", _LLAMA, "int8", home="llama.cpp"),
    "millrace-bf16": Entry("millrace_engine", "bf16", (), "bf16"),
    "llama.cpp-bf16": Entry("llama_cpp_engine", "BF16", _LLAMA, "bf16", home="llama.cpp"),
    "transformers-bf16": Entry("transformers_engine", "bf16", ("torch", "transformers"), "bf16"),
    "millrace-w4a8-avx2": Entry("millrace_engine", "w4a8@avx2", (), "int8"),
    "llama.cpp-q4_0-avx2": Entry("llama_cpp_engine", "Q4_0", _LLAMA, "int8", library="LLAMA_CPP_AVX2"),
}
