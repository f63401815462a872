"""How llama.cpp is built to be compared with: for all that this processor has, but AMX only where it is asked for.

    CMAKE_ARGS="$(python -m benchmarks.peers.build)" pip install 'millrace[peers]'
    CMAKE_ARGS="$(python -m benchmarks.peers.build --amx)" pip install 'millrace[peers]'
    CMAKE_ARGS="$(python -m benchmarks.peers.build --isa avx2)" pip install 'millrace[peers]'

--isa avx2 leaves out what is wider than AVX2, whatever the processor has: the peer of Millrace with MILLRACE_ISA=avx2.

With AMX, llama-cpp-python 0.3.36 ends in a segmentation fault on matrices in Q4_1, a real model's here; of other types
nothing of the kind is known. Which build is measured is said by the environment: the one whose packages are installed,
or LLAMA_CPP_LIB_PATH, the `llama_cpp/lib` folder of another. Each row's settings say AMX or no AMX, as llama.cpp tells.

Builds in results up to 2026-11-22 lack AVX_VNNI though it is asked for here: they are older than this list. Where
there is AVX512_VNNI, ggml takes that for the same products.
"""

import argparse
from collections.abc import Collection

from millrace.machine.cpu import cpu_flags

# As the kernel names them in /proc/cpuinfo, and as ggml does in its options and in its system info.
_INSTRUCTIONS = {
    "avx": "AVX", "avx2": "AVX2", "fma": "FMA", "f16c": "F16C", "bmi2": "BMI2", "avx_vnni": "AVX_VNNI",
    "avx512f": "AVX512", "avx512vbmi": "AVX512_VBMI", "avx512_vnni": "AVX512_VNNI", "avx512_bf16": "AVX512_BF16",
}  # fmt: skip
_AMX = {"amx_tile": "AMX_TILE", "amx_int8": "AMX_INT8", "amx_bf16": "AMX_BF16"}  # it tells of AMX_INT8 alone
NO_WIDER = {"avx2": ("avx", "avx2", "fma", "f16c", "bmi2")}  # what is left of them, by instruction set


def cmake_args(flags: Collection[str], *, amx: bool = False, isa: str | None = None) -> str:
    """For a processor with these flags; where it is no x86-64, whatever ggml finds out by itself.

    isa: of `NO_WIDER`, what is wider is left out; None: nothing is
    """
    wanted = _INSTRUCTIONS | (_AMX if amx else {})
    if isa is not None:
        wanted = {flag: name for flag, name in wanted.items() if flag in NO_WIDER[isa]}
    options = [f"-DGGML_{name}=ON" for flag, name in wanted.items() if flag in flags]
    return " ".join(["-DGGML_NATIVE=OFF", *options] if options else ["-DGGML_NATIVE=ON"])


def usable(flags: Collection[str], isa: str | None) -> Collection[str]:
    """The flags that a build for this instruction set may use; all if none is said."""
    return flags if isa not in NO_WIDER else [flag for flag in flags if flag in NO_WIDER[isa]]


def used(system: str) -> set[str]:
    """What a build tells in its system info."""
    parts = (part.partition("=") for part in system.replace("CPU :", "").split("|"))
    return {name.strip() for name, _, value in parts if value.strip() != "0"}


def amx(system: str) -> str:
    return "AMX" if _AMX["amx_int8"] in used(system) else "no AMX"


def unused(system: str, flags: Collection[str]) -> list[str]:
    """What this processor has by its flags, and the build that gives `system` as its system info does without."""
    told = {**_INSTRUCTIONS, "amx_int8": "AMX_INT8"}
    return [name for flag, name in told.items() if flag in flags and name not in used(system)]


def undocumented(system: str, flags: Collection[str]) -> list[str]:
    """What `cmake_args` asks for on such a processor, and this build lacks: it was built in another way."""
    return [name for name in unused(system, flags) if name in _INSTRUCTIONS.values()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.build", description="Print llama.cpp's options.")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--amx", action="store_true", help="with AMX, where the processor has it")
    either.add_argument("--isa", choices=[*NO_WIDER], help="nothing wider than this instruction set")
    given = parser.parse_args()
    print(cmake_args(cpu_flags(), amx=given.amx, isa=given.isa))
