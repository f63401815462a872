// short_conv   y[t] = bias + sum over j of w[j] x[t - taps + 1 + j], j ascending, each a fused multiply-add
//   x (T, n) at x_stride, sequences packed | w (taps, n) | y (T, n)
// Rows before a sequence's first one here are its state, or zeros at its position 0; its last taps - 1 rows become it. So a
// row's bits depend on the rows before it and not on how they were cut. A task is a sequence's rows in some columns.
#pragma once
namespace millrace::MILLRACE_ISA {

inline void short_conv(const ShortConvArgs& a, StepContext& c) {
  constexpr int64_t kColumns = 256;
  constexpr int kMaxTaps = 8;
  const States& states = c.states[a.state];
  const int64_t parts = (a.n + kColumns - 1) / kColumns, past = a.taps - 1;
  for (Chunk task(c, c.sequences.count * parts, 1); task.next();) {
    const int s = static_cast<int>(task.begin / parts);
    const int64_t from = task.begin % parts * kColumns, to = from + kColumns < a.n ? from + kColumns : a.n;
    const int64_t begin = c.sequences.starts[s], end = c.sequences.starts[s + 1];
    const float* before = states.before(a.layer, s);  // (taps - 1, n)
    float* behind = states.behind(a.layer, s);
    const bool fresh = c.sequences.positions[begin] == 0;
    each_vector(from, to, [&](int64_t i, auto lanes) {
      F w[kMaxTaps], rows[kMaxTaps];
      for (int64_t j = 0; j < a.taps; ++j) w[j] = lanes.load(a.w + j * a.n + i);
      for (int64_t j = 0; j < past; ++j) rows[j] = fresh ? zero() : lanes.load(before + j * a.n + i);
      const F bias = a.bias ? lanes.load(a.bias + i) : zero();
      for (int64_t t = begin; t < end; ++t) {
        rows[past] = lanes.load(a.x + t * a.x_stride + i);
        F sum = bias;
        for (int64_t j = 0; j < a.taps; ++j) sum = fma(w[j], rows[j], sum);
        lanes.store(a.y + t * a.n + i, sum);
        for (int64_t j = 0; j < past; ++j) rows[j] = rows[j + 1];
      }
      for (int64_t j = 0; j < past; ++j) lanes.store(behind + j * a.n + i, rows[j]);
    });
  }
}

}  // namespace millrace::MILLRACE_ISA
