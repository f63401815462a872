// gather_rows   y[r] = x[row_tokens[r]]      x (T, n) | y (R, n)
#pragma once
namespace millrace::MILLRACE_ISA {

inline void gather_rows(const GatherRowsArgs& a, StepContext& c) {
  for (Chunk r(c, c.n_rows, 4); r.next();)
    for (int64_t row = r.begin; row < r.end; ++row)
      __builtin_memcpy(a.y + row * a.n, a.x + static_cast<int64_t>(c.row_tokens[row]) * a.n, sizeof(float) * a.n);
}

}  // namespace millrace::MILLRACE_ISA
