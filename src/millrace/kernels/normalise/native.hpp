// normalise   y = x / max(|x|, eps), row by row      x (rows, n) at x_stride | y (rows, n)
//   the sum of squares as in rms_norm
#pragma once
namespace millrace::MILLRACE_ISA {

inline void normalise(const NormaliseArgs& a, StepContext& c) {
  for (Chunk t(c, c.sizes[a.rows], 4); t.next();)
    for (int64_t row = t.begin; row < t.end; ++row) {
      const float* x = a.x + row * a.x_stride;
      F squares = zero();
      each_vector(0, a.n, [&](int64_t i, auto lanes) {
        const F v = lanes.load(x + i);
        squares = fma(v, v, squares);
      });
      const F length = max(splat(a.eps), sqrt(splat(sum(squares))));
      each_vector(0, a.n, [&](int64_t i, auto lanes) { lanes.store(a.y + row * a.n + i, lanes.load(x + i) / length); });
    }
}

}  // namespace millrace::MILLRACE_ISA
