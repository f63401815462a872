// rope   rotate q and k by their positions, in place; with layer >= 0 also write k and v into the pages of a cache
//   Su et al., arXiv:2104.09864. Of the first R = rotary_dim numbers of a head, pairs are rotated:
//   (x[d], x[d + R/2]) -> (x[d] cos - x[d + R/2] sin, x[d + R/2] cos + x[d] sin)
//   in the half-split order of most Hugging Face checkpoints; interleaved: (x[2d], x[2d + 1])
//   table (context, R): R/2 cosines, then R/2 sines of each position; beyond it rows become NaN
//   q, k, v rows of heads * D floats at their strides
#pragma once
#include "convert/hadamard.hpp"

namespace millrace::MILLRACE_ISA {

inline void rotate(float* x, const float* table, int64_t rotary_dim) {
  const int64_t half = rotary_dim / 2;
  for (int64_t d = 0; d < half; d += 16) {
    const int n = half - d < 16 ? static_cast<int>(half - d) : 16;
    const F cosine = load(table + d, n), sine = load(table + half + d, n);
    const F a = load(x + d, n), b = load(x + half + d, n);
    store(x + d, a * cosine - b * sine, n);
    store(x + half + d, b * cosine + a * sine, n);
  }
}

inline void rotate_interleaved(float* x, const float* table, int64_t rotary_dim) {
  const int64_t half = rotary_dim / 2;
  alignas(64) float even[16], odd[16];
  for (int64_t d = 0; d < half; d += 16) {
    const int n = half - d < 16 ? static_cast<int>(half - d) : 16;
    float* pairs = x + 2 * d;
    for (int i = 0; i < n; ++i) even[i] = pairs[2 * i], odd[i] = pairs[2 * i + 1];
    const F cosine = load(table + d, n), sine = load(table + half + d, n);
    const F a = load(even, n), b = load(odd, n);
    store(even, a * cosine - b * sine, n);
    store(odd, b * cosine + a * sine, n);
    for (int i = 0; i < n; ++i) pairs[2 * i] = even[i], pairs[2 * i + 1] = odd[i];
  }
}

inline void write_f32(const float* k, const float* v, const KvLayout& kv, uint8_t* block, int slot) {
  auto* keys = reinterpret_cast<float*>(block);
  auto* values = reinterpret_cast<float*>(block + kv.key_bytes()) + slot * kv.value_width();
  for (int d = 0; d < kv.key_dim; ++d) keys[d * kPageTokens + slot] = k[d];
  for (int d = 0; d < kv.value_dim; ++d) values[d] = v[d];
}

inline void write_bf16(const float* k, const float* v, const KvLayout& kv, uint8_t* block, int slot) {
  auto* keys = reinterpret_cast<uint32_t*>(block);
  auto* values = reinterpret_cast<uint16_t*>(block + kv.key_bytes()) + slot / 2 * kv.value_width() * 2 + slot % 2;
  for (int d = 0; d < kv.key_dim; d += 16) {
    const int n = kv.key_dim - d < 16 ? kv.key_dim - d : 16;
    uint32_t pairs[8];
    store_bf16(reinterpret_cast<uint16_t*>(pairs), load(k + d, n), 16);
    for (int i = 0; i < n / 2; ++i) keys[(d / 2 + i) * kPageTokens + slot] = pairs[i];
  }
  for (int d = 0; d < kv.value_dim; d += 16) {
    const int n = kv.value_dim - d < 16 ? kv.value_dim - d : 16;
    store_u16_apart(values + d * 2, to_bf16(load(v + d, n)), n);
  }
}

// code = nearest(x * (127 / amax)), as convert has it. Returns the scale, which is NaN where an x is not finite.
inline float to_codes(const float* x, int n, int8_t* codes) {
  F check = zero();
  const float amax = row_magnitude(x, n, check), inverse = amax > kNothing ? 127.0f / amax : 0.0f;
  for (int i = 0; i < n; i += 16) store_i8(codes + i, round(load(x + i, n - i < 16 ? n - i : 16) * splat(inverse)));
  return amax / 127.0f + sum(check);
}

inline void write_int8(const float* k, const float* v, const KvLayout& kv, uint8_t* block, int slot) {
  int8_t codes[kMaxHeadDim + 16];
  kv.key_scales(block)[slot] = to_codes(k, kv.key_dim, codes);
  for (int d = 0; d < kv.key_dim; ++d)
    block[d / 4 * kPageTokens * 4 + slot * 4 + d % 4] = static_cast<uint8_t>(codes[d] + 128);
  kv.value_scales(block)[slot] = to_codes(v, kv.value_dim, codes);
  auto* values = reinterpret_cast<int8_t*>(block + kv.key_bytes()) + slot / 4 * kv.value_width() * 4 + slot % 4;
  for (int d = 0; d < kv.value_dim; ++d) values[d * 4] = codes[d];
}

// To the nearest of E4M3, ties to even, of magnitudes up to 448 (2^-6 and less are its subnormals, multiples of 2^-9).
// What is no number becomes one, and the scale beside it says so.
inline I to_e4m3(F x) {
  const F magnitude = abs(x);
  const I bits = as_int(magnitude), odd = shift_right(bits, 20) & splat_i(1);
  const I normal = shift_right(bits + odd + splat_i(0x7ffff), 20) - splat_i((127 - 7) << 3);
  const I small = round(magnitude * splat(512.0f));
  const I code = as_int(if_less(magnitude, splat(0x1p-6f), as_float(small), as_float(normal)));
  return code + (shift_right(as_int(x), 24) & splat_i(0x80));
}

// As to_codes, of E4M3, whose largest is 448, with the least power of two for a scale: what codes and weights of bfloat16
// stand for stays theirs to the last bit.
inline float to_e4m3_codes(const float* x, int n, int8_t* codes) {
  F check = zero();
  const float least = row_magnitude(x, n, check) / 448.0f;
  uint32_t bits;
  __builtin_memcpy(&bits, &least, 4);
  bits = (bits + 0x7fffff) & 0x7f800000;
  float scale;
  __builtin_memcpy(&scale, &bits, 4);
  if (least <= kNothing) scale = 0.0f;
  const F inverse = splat(scale > 0.0f ? 1.0f / scale : 0.0f);
  for (int i = 0; i < n; i += 16) store_i8(codes + i, to_e4m3(load(x + i, n - i < 16 ? n - i : 16) * inverse));
  return scale + sum(check);
}

inline void write_fp8(const float* k, const float* v, const KvLayout& kv, uint8_t* block, int slot) {
  alignas(64) float transformed[kMaxHeadDim];
  int8_t codes[kMaxHeadDim + 16];
  hadamard_group(k, kv.key_dim, transformed);
  kv.key_scales(block)[slot] = to_e4m3_codes(transformed, kv.key_dim, codes);
  for (int d = 0; d < kv.key_dim; d += 2) __builtin_memcpy(block + (d / 2 * kPageTokens + slot) * 2, codes + d, 2);
  kv.value_scales(block)[slot] = to_e4m3_codes(v, kv.value_dim, codes);
  auto* values = reinterpret_cast<int8_t*>(block + kv.key_bytes()) + slot / 2 * kv.value_width() * 2 + slot % 2;
  for (int d = 0; d < kv.value_dim; ++d) values[d * 2] = codes[d];
}

// code = nearest((x - least) * (15 / (most - least))), with zeros up to a multiple of 16. scales: the scale and, a page's
// tokens further, the least, which are NaN where an x is not finite.
inline void to_nibbles(const float* x, int n, uint8_t* codes, float* scales) {
  F check = zero(), opposite = zero();
  const float most = row_largest(x, n, check);
  float negative[kMaxHeadDim];
  for (int i = 0; i < n; ++i) negative[i] = -x[i];
  const float least = -row_largest(negative, n, opposite), range = most - least;
  const float inverse = range > kNothing ? 15.0f / range : 0.0f, wrong = sum(check);
  for (int i = 0; i < n; i += 16) {
    const int count = n - i < 16 ? n - i : 16;
    const F code = (load(x + i, count) - splat(least)) * splat(inverse);
    store_i8(reinterpret_cast<int8_t*>(codes + i), round(first(code, count, zero())) & splat_i(15));
  }
  scales[0] = (range > kNothing ? range / 15.0f : 0.0f) + wrong;
  scales[kPageTokens] = least + wrong;
}

inline void write_int4(const float* k, const float* v, const KvLayout& kv, uint8_t* block, int slot) {
  alignas(64) float transformed[kMaxHeadDim];
  uint8_t codes[kMaxHeadDim + 32];
  hadamard_group(k, kv.key_dim, transformed);
  to_nibbles(transformed, kv.key_dim, codes, kv.key_scales(block) + slot);
  for (int d = 0; d < kv.key_dim; d += 8)
    for (int i = 0; i < 4; ++i)
      block[(d / 8 * kPageTokens + slot) * 4 + i] = static_cast<uint8_t>(codes[d + i] | codes[d + i + 4] << 4);
  to_nibbles(v, kv.value_dim, codes, kv.value_scales(block) + slot);
  for (int64_t d = up(kv.value_dim, 16); d < kv.value_width(); ++d) codes[d] = 0;
  uint8_t* values = block + kv.key_bytes() + slot / 4 * kv.value_width() * 2 + slot % 4;
  for (int64_t d = 0; d < kv.value_width(); d += 32)
    for (int i = 0; i < 16; ++i)
      values[d * 2 + i * 4] = static_cast<uint8_t>(codes[d + i] | codes[d + i + 16] << 4);
}

inline void write_block(const float* k, const float* v, const KvLayout& kv, uint8_t* block, int slot) {
  switch (kv.format) {
    case KvFormat::f32: return write_f32(k, v, kv, block, slot);
    case KvFormat::bf16: return write_bf16(k, v, kv, block, slot);
    case KvFormat::int8: return write_int8(k, v, kv, block, slot);
    case KvFormat::fp8: return write_fp8(k, v, kv, block, slot);
    case KvFormat::int4: return write_int4(k, v, kv, block, slot);
  }
}

inline void spoil(float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = __builtin_nanf("");
}

// One row of q or k, all its heads.
inline void rotate_heads(float* x, const RopeArgs& a, int heads, int64_t row) {
  const int position = a.positions[row];
  if (position < 0 || position >= a.context) return spoil(x, heads * a.head_dim);
  const float* table = a.table + static_cast<int64_t>(position) * a.rotary_dim;
  for (int h = 0; h < heads; ++h)
    if (a.interleaved) rotate_interleaved(x + h * a.head_dim, table, a.rotary_dim);
    else rotate(x + h * a.head_dim, table, a.rotary_dim);
}

// Rows of a task. Keys of neighbouring tokens share their cache lines, which workers should not write at the same time.
inline int64_t rope_rows(int64_t rows, int n_workers) {
  const int64_t fair = rows / (4 * n_workers);
  return fair < 16 ? 4 : up(fair, 16);
}

inline void rope(const RopeArgs& a, StepContext& c) {
  const Cache* cache = a.layer < 0 ? nullptr : &c.caches[a.cache];
  const int64_t n_rows = c.sizes[a.rows];
  for (Chunk t(c, n_rows, rope_rows(n_rows, c.n_workers)); t.next();)
    for (int64_t row = t.begin; row < t.end; ++row) {
      if (a.table && a.q) rotate_heads(a.q + row * a.q_stride, a, a.heads, row);
      if (a.table && a.k) rotate_heads(a.k + row * a.k_stride, a, a.kv_heads, row);
      if (!cache) continue;
      const int position = c.sequences.positions[row], sequence = c.sequences.sequence_of[row];
      for (int h = 0; h < a.kv_heads; ++h)
        write_block(a.k + row * a.k_stride + h * a.head_dim, a.v + row * a.v_stride + h * a.value_dim, cache->layout,
                    cache->block(a.layer, sequence, position, h), position % kPageTokens);
    }
}

}  // namespace millrace::MILLRACE_ISA
