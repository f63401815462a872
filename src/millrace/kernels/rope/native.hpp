// rope   rotate q and k by their positions, in place; with layer >= 0 also write k and v into the KV pages
//   Su et al., arXiv:2104.09864, in the half-split order of Hugging Face checkpoints:
//   (x[d], x[d + D/2]) -> (x[d] cos - x[d + D/2] sin, x[d + D/2] cos + x[d] sin)
//   table (context, D): D/2 cosines, then D/2 sines of each position | q, k, v rows of heads * D floats at their strides
#pragma once
namespace millrace::MILLRACE_ISA {

inline void rotate(float* x, const float* table, int64_t head_dim) {
  const int64_t half = head_dim / 2;
  for (int64_t d = 0; d < half; d += 16) {
    const int n = half - d < 16 ? static_cast<int>(half - d) : 16;
    const F cosine = load(table + d, n), sine = load(table + half + d, n);
    const F a = load(x + d, n), b = load(x + half + d, n);
    store(x + d, a * cosine - b * sine, n);
    store(x + half + d, b * cosine + a * sine, n);
  }
}

inline void write_f32(const float* k, const float* v, const KvLayout& kv, uint8_t* block, int slot) {
  auto* keys = reinterpret_cast<float*>(block);
  auto* values = reinterpret_cast<float*>(block + kv.key_bytes()) + slot * kv.value_width();
  for (int d = 0; d < kv.head_dim; ++d) keys[d * kPageTokens + slot] = k[d];
  for (int d = 0; d < kv.head_dim; ++d) values[d] = v[d];
}

inline void write_bf16(const float* k, const float* v, const KvLayout& kv, uint8_t* block, int slot) {
  auto* keys = reinterpret_cast<uint16_t*>(block);
  auto* values = reinterpret_cast<uint16_t*>(block + kv.key_bytes()) + slot / 2 * kv.value_width() * 2 + slot % 2;
  for (int d = 0; d < kv.head_dim; d += 16) {
    const int n = kv.head_dim - d < 16 ? kv.head_dim - d : 16;
    uint16_t kb[16], vb[16];
    store_u16(kb, to_bf16(load(k + d, n)));
    store_u16(vb, to_bf16(load(v + d, n)));
    for (int i = 0; i < n; ++i) keys[(d + i) / 2 * kPageTokens * 2 + slot * 2 + (d + i) % 2] = kb[i];
    for (int i = 0; i < n; ++i) values[(d + i) * 2] = vb[i];
  }
}

// code = nearest(x * (127 / amax)), as convert has it. Returns the scale, which is NaN where an x is not finite.
inline float to_codes(const float* x, int n, int8_t* codes) {
  F check = zero();
  const float amax = row_magnitude(x, n, check), inverse = amax > 0.0f ? 127.0f / amax : 0.0f;
  for (int i = 0; i < n; i += 16) store_i8(codes + i, round(load(x + i, n - i < 16 ? n - i : 16) * splat(inverse)));
  return amax / 127.0f + sum(check);
}

inline void write_int8(const float* k, const float* v, const KvLayout& kv, uint8_t* block, int slot) {
  int8_t codes[kMaxHeadDim + 16];
  kv.key_scales(block)[slot] = to_codes(k, kv.head_dim, codes);
  for (int d = 0; d < kv.head_dim; ++d)
    block[d / 4 * kPageTokens * 4 + slot * 4 + d % 4] = static_cast<uint8_t>(codes[d] + 128);
  kv.value_scales(block)[slot] = to_codes(v, kv.head_dim, codes);
  auto* values = reinterpret_cast<int8_t*>(block + kv.key_bytes()) + slot / 4 * kv.value_width() * 4 + slot % 4;
  for (int d = 0; d < kv.head_dim; ++d) values[d * 4] = codes[d];
}

inline void rope(const RopeArgs& a, StepContext& c) {
  const int64_t D = a.head_dim;
  for (Chunk t(c, c.n_tokens, 4); t.next();)
    for (int64_t row = t.begin; row < t.end; ++row) {
      const int position = c.positions[row];
      const float* table = a.table ? a.table + position * D : nullptr;
      for (int h = 0; table && a.q && h < a.heads; ++h) rotate(a.q + row * a.q_stride + h * D, table, D);
      for (int h = 0; a.k && h < a.kv_heads; ++h) {
        float* k = a.k + row * a.k_stride + h * D;
        if (table) rotate(k, table, D);
        if (a.layer < 0) continue;
        const float* v = a.v + row * a.v_stride + h * D;
        uint8_t* block = c.kv.keys(a.layer, c.page_of(c.sequence_of[row], position), h);
        if (c.kv.format == KvFormat::f32)
          write_f32(k, v, c.kv, block, position % kPageTokens);
        else if (c.kv.format == KvFormat::bf16)
          write_bf16(k, v, c.kv, block, position % kPageTokens);
        else
          write_int8(k, v, c.kv, block, position % kPageTokens);
      }
    }
}

}  // namespace millrace::MILLRACE_ISA
