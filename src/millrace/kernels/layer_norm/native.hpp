// layer_norm   y = (x - mean) / sqrt(variance + eps) * w + b      Ba, Kiros and Hinton, arXiv:1607.06450
//   x (rows, n) float at x_stride | w, b (n) | y in the asked row format, y_stride bytes apart
//   sums: lane i takes elements i, i+16, ..., then the fixed tree. Where the mean is large its rounding is most of the
//   error, so it is taken twice: `rest` is the mean of what is left when the first is gone, and the variance that of it
#pragma once
#include "convert/native.hpp"
namespace millrace::MILLRACE_ISA {

inline void layer_norm_row(const float* x, const float* w, const float* b, int64_t n, float eps, float* y) {
  F total = zero();
  each_vector(0, n, [&](int64_t i, auto lanes) { total = total + lanes.load(x + i); });
  const F mean = splat(sum(total) / static_cast<float>(n));
  total = zero();
  each_vector(0, n, [&](int64_t i, auto lanes) { total = total + lanes.only(lanes.load(x + i) - mean, zero()); });
  const F rest = splat(sum(total) / static_cast<float>(n));
  F squares = zero();
  each_vector(0, n, [&](int64_t i, auto lanes) {
    const F v = lanes.only(lanes.load(x + i) - mean - rest, zero());
    squares = fma(v, v, squares);
  });
  const F scale = splat(1.0f) / sqrt(splat(sum(squares) / static_cast<float>(n) + eps));
  each_vector(0, n, [&](int64_t i, auto lanes) {
    lanes.store(y + i, fma((lanes.load(x + i) - mean - rest) * scale, lanes.load(w + i), lanes.load(b + i)));
  });
}

inline void layer_norm(const LayerNormArgs& a, StepContext& c) {
  for (Chunk t(c, c.sizes[a.rows], 2); t.next();)
    for (int64_t row = t.begin; row < t.end; ++row) {
      uint8_t* y = a.y + row * a.y_stride;
      float* out = a.format ? c.scratch : reinterpret_cast<float*>(y);
      layer_norm_row(a.x + row * a.x_stride, a.w, a.b, a.n, a.eps, out);
      if (a.format) store_row(out, a.n, a.format, a.group, y);
    }
}

}  // namespace millrace::MILLRACE_ISA
