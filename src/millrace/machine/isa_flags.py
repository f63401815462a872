"""Instruction sets of the kernels, and the processor flags (of /proc/cpuinfo) that each needs."""

NEEDED = {
    "amx": ("amx_tile", "amx_bf16", "amx_int8"),
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"),
    "avx2": ("avx2", "fma", "f16c"),
}
