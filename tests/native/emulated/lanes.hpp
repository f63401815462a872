// The lanes of a unit whose kernels use AMX's tiles where there is no AMX: tiles are emulated, lanes are those that the
// compiler's flags allow. The kernels' sources are the product's, and say _tile_... as they do in its unit.
#pragma once
#if defined(__AVX2__)
#include "lanes/avx2.hpp"
#else
#include "lanes/scalar.hpp"
#endif
#include "tiles.hpp"

#define MILLRACE_TILES

// immintrin.h has most of them as macros.
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#undef _tile_dpbuud

namespace millrace::MILLRACE_ISA {

inline void _tile_loadconfig(const void* from) { emulated::load_configuration(from); }
inline void _tile_release() { emulated::release_tiles(); }
inline void _tile_loadd(int tile, const void* from, int64_t stride) { emulated::load_tile(tile, from, stride); }
inline void _tile_stream_loadd(int tile, const void* from, int64_t stride) { emulated::load_tile(tile, from, stride); }
inline void _tile_stored(int tile, void* to, int64_t stride) { emulated::store_tile(tile, to, stride); }
inline void _tile_zero(int tile) { emulated::zero_tile(tile); }
inline void _tile_dpbf16ps(int sums, int a, int b) { emulated::multiply_bf16(sums, a, b); }
inline void _tile_dpbssd(int sums, int a, int b) { emulated::multiply_bytes(emulated::Signs::both, sums, a, b); }
inline void _tile_dpbsud(int sums, int a, int b) { emulated::multiply_bytes(emulated::Signs::first, sums, a, b); }
inline void _tile_dpbusd(int sums, int a, int b) { emulated::multiply_bytes(emulated::Signs::second, sums, a, b); }
inline void _tile_dpbuud(int sums, int a, int b) { emulated::multiply_bytes(emulated::Signs::none, sums, a, b); }

inline I less_bytes(I a, int n) {
  uint8_t bytes[64];
  store_i(bytes, a);
  for (auto& byte : bytes) byte = static_cast<uint8_t>(byte - n);
  return load_i(bytes);
}

}  // namespace millrace::MILLRACE_ISA

#include "lanes/tiles.hpp"
