"""How llama.cpp is built to be compared with: for all that this processor has, but without AMX.

    CMAKE_ARGS="$(python -m benchmarks.peers.build)" pip install 'millrace[peers]'

With AMX, llama-cpp-python 0.3.36 ends in a segmentation fault on matrices in Q4_1.
"""

from collections.abc import Collection

from millrace.machine.cpu import cpu_flags

# As the kernel names them in /proc/cpuinfo, and as ggml does in its options and in its system info.
_INSTRUCTIONS = {
    "avx": "AVX", "avx2": "AVX2", "fma": "FMA", "f16c": "F16C", "bmi2": "BMI2", "avx_vnni": "AVX_VNNI",
    "avx512f": "AVX512", "avx512vbmi": "AVX512_VBMI", "avx512_vnni": "AVX512_VNNI", "avx512_bf16": "AVX512_BF16",
    "amx_int8": "AMX_INT8",
}  # fmt: skip
_CRASHES = ("AMX_INT8",)


def cmake_args(flags: Collection[str]) -> str:
    """For a processor with these flags; where it is no x86-64, whatever ggml finds out by itself."""
    options = [f"-DGGML_{name}=ON" for flag, name in _INSTRUCTIONS.items() if flag in flags and name not in _CRASHES]
    return " ".join(["-DGGML_NATIVE=OFF", *options] if options else ["-DGGML_NATIVE=ON"])


def unused(system: str, flags: Collection[str]) -> list[str]:
    """What this processor has by its flags, and the build that gives `system` as its system info does without."""
    used = {part.partition("=")[0].strip() for part in system.replace("CPU :", "").split("|")}
    return [name for flag, name in _INSTRUCTIONS.items() if flag in flags and name not in used]


if __name__ == "__main__":
    print(cmake_args(cpu_flags()))
