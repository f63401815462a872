// rms_norm   y = x * (1 / sqrt(mean(x^2) + eps)) * w      Zhang and Sennrich, arXiv:1910.07467
//   x (rows, runs * n) float, stride x_stride | w (n) | y in the asked row format, y_stride bytes apart
//   the sum of squares: lane i takes elements i, i+16, ... by fma, then the fixed tree
#pragma once
#include "convert/native.hpp"
namespace millrace::MILLRACE_ISA {

inline void rms_norm_run(const float* x, const float* w, int64_t n, float eps, float* y) {
  F squares = zero();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const F v = load(x + i);
    squares = fma(v, v, squares);
  }
  const int tail = static_cast<int>(n - i);
  if (tail) {
    const F v = load(x + i, tail);
    squares = fma(v, v, squares);
  }
  const F scale = splat(1.0f) / sqrt(splat(sum(squares) / static_cast<float>(n) + eps));
  for (i = 0; i + 16 <= n; i += 16) store(y + i, load(x + i) * scale * load(w + i));
  if (tail) store(y + i, load(x + i, tail) * scale * load(w + i, tail), tail);
}

inline void rms_norm(const RmsNormArgs& a, StepContext& c) {
  for (Chunk t(c, c.sizes[a.rows], 2); t.next();)
    for (int64_t row = t.begin; row < t.end; ++row) {
      const float* x = a.x + row * a.x_stride;
      uint8_t* y = a.y + row * a.y_stride;
      float* out = a.format ? c.scratch : reinterpret_cast<float*>(y);
      for (int run = 0; run < a.runs; ++run) rms_norm_run(x + run * a.n, a.w, a.n, a.eps, out + run * a.n);
      if (a.format) store_row(out, a.n, a.format, a.group, y);
    }
}

}  // namespace millrace::MILLRACE_ISA
