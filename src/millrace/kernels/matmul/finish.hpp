// Totals of a product to y: bias, expression, residual; columns beyond the matrix are dropped. Packed, y is rounded as
// convert does it.
#pragma once
#include "elementwise/native.hpp"

namespace millrace::MILLRACE_ISA {

// Sixteen columns of a panel, its half v; gated, both halves, which become sixteen columns.
inline void finish_half(const MatmulArgs& a, const float* total, int64_t row, int rows, int64_t panel, int v) {
  const int64_t columns = !a.gated ? a.n : a.packed ? a.n / 2 : a.y_stride, column = a.gated ? panel * 16 : (panel * 2 + v) * 16;
  const int width = columns - column < 16 ? static_cast<int>(columns - column) : 16;
  if (width <= 0) return;
  const auto bias_of = [&](int side) {
    const int64_t at = (panel * 2 + v + side) * 16;
    return a.bias ? load(a.bias + at, a.n - at < 16 ? static_cast<int>(a.n - at) : 16) : zero();
  };
  const auto total_of = [&](int r, int side, F bias) {
    const F value = load(total + (r * 2 + v + side) * 16);
    return a.bias ? value + bias : value;
  };
  const auto write = [&](int r, F value) {
    const int64_t to = (row + r) * a.y_stride + column;
    if (a.residual) value = value + load(a.residual + to, width);
    if (a.packed)
      store_u16(reinterpret_cast<uint16_t*>(a.y) + to, to_bf16(value));
    else
      store(a.y + to, value, width);
  };
  if (!a.code[0]) {
    const F bias = bias_of(0);
    for (int r = 0; r < rows; ++r) write(r, total_of(r, 0, bias));
    return;
  }
  F registers[8][kStrip];
  for (int side = 0; side <= a.gated; ++side) {
    const F bias = bias_of(side);
    for (int r = 0; r < rows; ++r) registers[side][r] = total_of(r, side, bias);
  }
  const int result = evaluate(a.code, a.imm, registers, rows);
  for (int r = 0; r < rows; ++r) write(r, registers[result][r]);
}

inline void finish(const MatmulArgs& a, const float* total, int64_t row, int rows, int64_t panel) {
  finish_half(a, total, row, rows, panel, 0);
  if (!a.gated) finish_half(a, total, row, rows, panel, 1);
}

}  // namespace millrace::MILLRACE_ISA
