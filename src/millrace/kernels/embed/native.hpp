// embed   y[i] = table[ids[i]] * scale      table (V, n) float or bfloat16 | y (rows, n) float
//   the id -1 - e gives row e of the step's embedding rows as it is; any other that the table does not have a row of NaN
#pragma once
namespace millrace::MILLRACE_ISA {

inline void embed(const EmbedArgs& a, StepContext& c) {
  for (Chunk t(c, c.sizes[a.rows], 8); t.next();)
    for (int64_t row = t.begin; row < t.end; ++row) {
      float* y = a.y + row * a.n;
      if (const int32_t e = -1 - a.ids[row]; e >= 0 && e < c.embeddings.count && c.embeddings.width == a.n) {
        __builtin_memcpy(y, c.embeddings.rows + static_cast<int64_t>(e) * a.n, static_cast<size_t>(a.n) * 4);
        continue;
      }
      if (a.ids[row] < 0 || a.ids[row] >= a.vocab) {
        for (int i = 0; i < a.n; ++i) y[i] = __builtin_nanf("");
        continue;
      }
      const int64_t at = static_cast<int64_t>(a.ids[row]) * a.n;
      if (a.bf16) {
        const auto* table = reinterpret_cast<const uint16_t*>(a.table) + at;
        for (int i = 0; i < a.n; ++i) {
          const uint32_t bits = static_cast<uint32_t>(table[i]) << 16;
          float value;
          __builtin_memcpy(&value, &bits, 4);
          y[i] = value * a.scale;
        }
      } else {
        const auto* table = reinterpret_cast<const float*>(a.table) + at;
        for (int i = 0; i < a.n; ++i) y[i] = table[i] * a.scale;
      }
    }
}

}  // namespace millrace::MILLRACE_ISA
