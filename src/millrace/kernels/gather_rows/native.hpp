// gather_rows   y[r] = x[index[r]]      x (T, n) at x_stride | y (R, n)
//   an index that x does not have gives a row of NaN
#pragma once
namespace millrace::MILLRACE_ISA {

inline void gather_rows(const GatherRowsArgs& a, StepContext& c) {
  for (Chunk r(c, c.sizes[a.rows], 4); r.next();)
    for (int64_t row = r.begin; row < r.end; ++row) {
      const int64_t from = a.index[row];
      float* y = a.y + row * a.n;
      if (from >= 0 && from < c.sizes[a.rows_from])
        __builtin_memcpy(y, a.x + from * a.x_stride, sizeof(float) * a.n);
      else
        for (int i = 0; i < a.n; ++i) y[i] = __builtin_nanf("");
    }
}

}  // namespace millrace::MILLRACE_ISA
