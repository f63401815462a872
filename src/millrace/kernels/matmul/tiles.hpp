// Products of bfloat16 in the sums of AMX's tdpbf16ps. Of 32 inputs at a time, the even products and the odd ones are
// summed from 0, each a chain of fma; the sum of both is added to the total. Without tiles, the same in lanes.
#pragma once
#include "finish.hpp"

namespace millrace::MILLRACE_ISA {

constexpr int64_t kTileLines = 16;  // pairs of inputs in one product of tiles

// One product of tiles in lanes. acc += the sum of the even products and the sum of the odd ones, over `count` lines of
// pairs: line(k, v) is a weight's, and the four bytes of each row at x + 4 k are its pair.
template <int MR, int L, class Line>
[[gnu::always_inline]] inline void add_pairs(F (&acc)[MR][L], int64_t count, const uint8_t* x, int64_t x_stride, Line line) {
  const I upper = splat_i(static_cast<int32_t>(0xffff0000u));
  F even[MR][L], odd[MR][L];
  fill(even, zero());
  fill(odd, zero());
  for (int64_t k = 0; k < count; ++k) {
    const auto w = lines<L>([&](int v) { return line(k, v); });
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
      const I pair = splat_bytes(x + r * x_stride + k * 4);
#pragma GCC unroll 4
      for (int v = 0; v < L; ++v) {
        even[r][v] = fma(as_float(shift_left(w.line[v], 16)), as_float(shift_left(pair, 16)), even[r][v]);
        odd[r][v] = fma(as_float(w.line[v] & upper), as_float(pair & upper), odd[r][v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < L; ++v) acc[r][v] = acc[r][v] + (even[r][v] + odd[r][v]);
}

#if defined(MILLRACE_TILES)

constexpr int64_t kTileHeight = 16, kTileBytes = 64;
constexpr int kTilesRows = 32;  // two tiles of x against the two halves of a panel

// What is left of 32 inputs at the end of a row or a panel, with zeros behind it: those add nothing to a sum.
struct Rest {
  alignas(64) uint8_t bytes[kTilesRows * kTileBytes] = {};

  void take(const uint8_t* from, int64_t stride, int64_t rows, int64_t row_bytes) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t b = 0; b < row_bytes; ++b) bytes[r * kTileBytes + b] = from[r * stride + b];
  }
};

// 32 inputs of up to 32 rows against a panel.
[[gnu::always_inline]] inline void multiply_tiles(const uint8_t* x, int64_t x_stride, bool lower, const uint8_t* w) {
  _tile_loadd(6, w, 128);
  _tile_loadd(7, w + 64, 128);
  _tile_loadd(4, x, x_stride);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if (!lower) return;
  _tile_loadd(5, x + kTileHeight * x_stride, x_stride);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// What remains to be done of the panel before, a quarter at a time: it runs beside the products of the next one, which
// another part of the core computes.
struct Unfinished {
  const MatmulArgs& a;
  int64_t row;
  int upper, lower;
  int64_t panel = 0;
  const float* total = nullptr;
  int next = 0, count = 0;

  void begin(int64_t of, const float* totals) {
    panel = of;
    total = totals;
    next = 0;
    count = (lower ? 2 : 1) * (a.gated ? 1 : 2);
  }
  void step() {
    if (next == count) return;
    const int below = next % (lower ? 2 : 1), v = next / (lower ? 2 : 1);
    finish_half(a, total + below * kTileHeight * 32, row + below * upper, below ? lower : upper, panel, v);
    ++next;
  }
};

// Totals of one panel, as other tiles leave them: total[row][half of the panel][16].
template <bool kLower>
void tile_totals(const TileInput& in, const Rest& x_rest, bool first, float* total, Unfinished& before) {
  const int64_t n_lines = padded_k(in.k, 0) / 2, whole = n_lines / kTileLines * kTileLines;
  const int64_t pause = n_lines / 4;  // lines between two quarters
  int64_t due = pause;
  _tile_zero(0);
  _tile_zero(1);
  if (kLower) _tile_zero(2);
  if (kLower) _tile_zero(3);
  for (int64_t line = 0; line < whole; line += kTileLines) {
    const uint8_t* w = in.w + line * 128;
    if (first)  // weights come from memory once, for the first rows
      for (int64_t ahead = 0; ahead < kTileLines * 128; ahead += kLine) __builtin_prefetch(w + in.ahead + ahead);
    multiply_tiles(in.x + line * 4, in.x_stride, kLower, w);
    if (line + kTileLines >= due) {
      before.step();
      due += pause;
    }
  }
  if (whole < n_lines) {
    Rest w_rest;
    w_rest.take(in.w + whole * 128, kTileBytes, (n_lines - whole) * 2, kTileBytes);
    Tiles::fence();
    multiply_tiles(x_rest.bytes, kTileBytes, kLower, w_rest.bytes);
  }
  while (before.next < before.count) before.step();
  _tile_stored(0, total, 128);
  _tile_stored(1, total + 16, 128);
  if (kLower) _tile_stored(2, total + kTileHeight * 32, 128);
  if (kLower) _tile_stored(3, total + kTileHeight * 32 + 16, 128);
  Tiles::fence();
}

// Rows from `row` on, two tiles of them at most, against panels [panel, end).
inline void rows_by_tiles(const MatmulArgs& a, TileInput in, int64_t panel_stride, int64_t row, int rows, int64_t panel,
                          int64_t end) {
  constexpr int kHeight = static_cast<int>(kTileHeight);
  const int upper = rows < kHeight ? rows : kHeight, lower = rows - upper;
  const int64_t whole = padded_k(in.k, 0) / 2 / kTileLines * kTileLines, rest = padded_k(in.k, 0) / 2 - whole;
  alignas(64) float total[2][kTilesRows * 2 * 16];
  in.x += row * in.x_stride;
  in.w += panel * panel_stride;
  Rest x_rest;
  if (rest) x_rest.take(in.x + whole * 4, in.x_stride, rows, rest * 4);
  const Tiles tiles(upper, lower);
  Unfinished before{a, row, upper, lower};
  for (; panel < end; ++panel, in.w += panel_stride) {
    float* here = total[panel % 2];
    lower ? tile_totals<true>(in, x_rest, row == 0, here, before) : tile_totals<false>(in, x_rest, row == 0, here, before);
    before.begin(panel, here);
  }
  while (before.next < before.count) before.step();
}

#else

// Rows of a tile at most: sums of even, of odd products and of both.
constexpr int kTilesRows = 4;

template <int MR>
void tile_bf16_tiles(const TileInput& in, float* total) {
  const int64_t n_lines = padded_k(in.k, 0) / 2;
  F acc[MR][2];
  fill(acc, zero());
  for (int64_t from = 0; from < n_lines; from += kTileLines)
    add_pairs(acc, n_lines - from < kTileLines ? n_lines - from : kTileLines, in.x + from * 4, in.x_stride,
              [&](int64_t k, int v) { return in.load_ahead(in.w + (from + k) * 128 + v * 64); });
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < 2; ++v) store(total + (r * 2 + v) * 16, acc[r][v]);
}

#endif

}  // namespace millrace::MILLRACE_ISA
