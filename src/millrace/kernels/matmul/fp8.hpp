// Products of E4M3, whose order of sums native.hpp's head gives. A line of a panel is 32 outputs, two inputs of each; the
// scales of the outputs lie behind the last one.
#pragma once
#include "finish.hpp"

namespace millrace::MILLRACE_ISA {

template <int MR>
[[gnu::always_inline]] inline void scale_totals(const uint8_t* scales, float* total) {
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    const F scale = load(reinterpret_cast<const float*>(scales) + v * 16);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
      float* t = total + (r * 2 + v) * 16;
      store(t, in_order(load(t)) * scale);
    }
  }
}

template <int MR>
void tile_fp8(const TileInput& in, float* total) {
  tile_pairs<MR>(in, total, [&](int64_t k, int v) {
    const uint8_t* at = in.w + k * kLine + v * 32;
    if (v == 0) __builtin_prefetch(at + in.ahead);
    return load_e4m3(at);
  });
  scale_totals<MR>(in.w + padded_k(in.k, 0) * kPanel, total);
}

// A panel as one of bfloat16, and its scales behind it.
inline void bring_fp8(const TileInput& in, const uint8_t* w, float* scratch) {
  const int64_t n_lines = padded_k(in.k, 0) / 2;
  uint8_t* to = reinterpret_cast<uint8_t*>(scratch);
  for (int64_t k = 0; k < n_lines; ++k, w += kLine, to += 2 * kLine) {
    __builtin_prefetch(w + in.ahead);
    store_i(to, load_e4m3(w));
    store_i(to + kLine, load_e4m3(w + 32));
  }
  store_i(to, load_i(w));
  store_i(to + kLine, load_i(w + kLine));
}

template <int MR>
void tile_brought(const TileInput& in, float* total) {
  tile_pairs<MR>(in, total, [&](int64_t k, int v) { return load_i(in.w + k * 2 * kLine + v * kLine); });
  scale_totals<MR>(in.w + padded_k(in.k, 0) * 2 * kPanel, total);
}

}  // namespace millrace::MILLRACE_ISA
