// AVX-512's lanes, and the tiles of AMX for matrix products (matmul/tiles.hpp, matmul/byte_tiles.hpp).
#pragma once
#include "avx512.hpp"

#define MILLRACE_TILES  // kernels use tiles

namespace millrace::MILLRACE_ISA {

inline I less_bytes(I a, int n) { return {_mm512_sub_epi8(a.v, _mm512_set1_epi8(static_cast<char>(n)))}; }

}  // namespace millrace::MILLRACE_ISA

#include "tiles.hpp"
