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

constexpr int64_t kBroughtRows = 64;  // at a time: their totals and a block of weights stay in the first cache

// A block of a panel as one of bfloat16.
inline void bring_fp8(const TileInput& in, const uint8_t* w, int64_t n_lines, uint8_t* to) {
  for (int64_t k = 0; k < n_lines; ++k, w += kLine, to += 2 * kLine) {
    __builtin_prefetch(w + in.ahead);
    store_i(to, load_e4m3(w));
    store_i(to + kLine, load_e4m3(w + 32));
  }
}

template <int MR>
void add_brought(const TileInput& in, const uint8_t* x, const uint8_t* w, int64_t n_lines, bool opening, float* total) {
  F acc[MR][2];
  fill(acc, zero());
  for (int64_t k = 0; k < n_lines; ++k)
    each_row(acc, lines<2>([&](int v) { return load_i(w + k * 2 * kLine + v * kLine); }), x + k * 4, in.x_stride,
             [](F a, I pairs, I pair) { return dot2(a, pairs, pair); });
  add_block(acc, opening, total);
}

template <int MR>
void add_brought_of(int rows, const TileInput& in, const uint8_t* x, const uint8_t* w, int64_t n_lines, bool opening,
                    float* total) {
  if (rows == MR) return add_brought<MR>(in, x, w, n_lines, opening, total);
  if constexpr (MR > 1) add_brought_of<MR - 1>(rows, in, x, w, n_lines, opening, total);
}

// Up to kBroughtRows rows from `row` on, more than a tile has, against one panel: each block is brought once for all.
inline void rows_by_blocks(const MatmulArgs& a, const TileInput& in, const uint8_t* w, int64_t row, int64_t rows,
                           int64_t panel) {
  alignas(64) uint8_t block[kBlock * kPanel * 2];
  alignas(64) float total[kBroughtRows * kPanel];
  const int64_t n_lines = padded_k(in.k, 0) / 2, tiles = (rows + kTileRows - 1) / kTileRows;
  const int64_t tile_height = (rows + tiles - 1) / tiles;
  for (int64_t from = 0; from < n_lines; from += kBlock / 2) {
    const int64_t count = n_lines - from < kBlock / 2 ? n_lines - from : kBlock / 2;
    bring_fp8(in, w + from * kLine, count, block);
    for (int64_t r = 0; r < rows; r += tile_height) {
      const int height = static_cast<int>(rows - r < tile_height ? rows - r : tile_height);
      add_brought_of<kTileRows>(height, in, in.x + (row + r) * in.x_stride + from * 4, block, count, from == 0,
                                total + r * kPanel);
    }
  }
  for (int64_t r = 0; r < rows; ++r) scale_totals<1>(w + n_lines * kLine, total + r * kPanel);
  for (int64_t r = 0; r < rows; r += 16)
    finish(a, total + r * kPanel, row + r, static_cast<int>(rows - r < 16 ? rows - r : 16), panel);
}

}  // namespace millrace::MILLRACE_ISA
