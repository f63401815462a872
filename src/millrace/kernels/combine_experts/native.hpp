// combine_experts   y[t] = sum over j of weights[t, j] x[places[t, j]]      x (P, n) at x_stride | y (T, n)
//   One chain of fma from j = 0 on, so its bits depend on the row alone; a place that x does not have gives NaN.
#pragma once
namespace millrace::MILLRACE_ISA {

inline void combine_experts(const CombineExpertsArgs& a, StepContext& c) {
  const int64_t from = c.sizes[a.rows_from];
  for (Chunk chunk(c, c.sizes[a.rows], 4); chunk.next();)
    for (int64_t row = chunk.begin; row < chunk.end; ++row) {
      const int32_t* places = a.places + row * a.chosen;
      const float* weights = a.weights + row * a.chosen;
      bool valid = true;
      for (int j = 0; j < a.chosen; ++j) valid = valid && places[j] >= 0 && places[j] < from;
      each_vector(0, a.n, [&](int64_t i, auto lanes) {
        F total = valid ? zero() : splat(__builtin_nanf(""));
        for (int j = 0; valid && j < a.chosen; ++j)
          total = fma(splat(weights[j]), lanes.load(a.x + static_cast<int64_t>(places[j]) * a.x_stride + i), total);
        lanes.store(a.y + row * a.n + i, total);
      });
    }
}

}  // namespace millrace::MILLRACE_ISA
