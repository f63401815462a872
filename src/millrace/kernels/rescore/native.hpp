// rescore   the `count` largest logits of each row are computed again, from 8-bit weights
//   x (R, k) int8 groups | w rows of 8-bit codes (pack.py: one output after the other) | y (R, n) float, in place
//
// Ties at the edge go to lower ids. A logit that is computed again has the bits that the w8a8 class of matmul gives it;
// the others keep theirs.
#pragma once
#include "matmul/native.hpp"
namespace millrace::MILLRACE_ISA {

constexpr int64_t kRescoreBlock = 64;  // logits of which only the largest is looked at first

// Floats in the order of integers, and back.
inline int32_t float_key(float x) {
  int32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}
inline float key_float(int32_t key) {
  const int32_t bits = key < 0 ? key ^ 0x7fffffff : key;
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

// The largest t such that at least `count` of x are t or more; -infinity where fewer are finite. Exact, and for any
// floats: sampling's Search (logits_row.hpp) may stop early, weighs as well, and is asked only where all are finite.
inline float threshold(const float* x, int64_t n, int64_t count) {
  int64_t enough = float_key(-__builtin_inff()), too_few = float_key(__builtin_inff()) + int64_t{1};
  while (too_few - enough > 1) {
    const int64_t key = enough + (too_few - enough) / 2;
    if (row_count(x, n, key_float(static_cast<int32_t>(key))) >= count)
      enough = key;
    else
      too_few = key;
  }
  return key_float(static_cast<int32_t>(enough));
}

// The ids of the `count` largest of y (n), ascending, into ids; scratch has room for 2 n + n / 64 + 64 values.
inline int64_t find_largest(const float* y, int64_t n, int64_t count, int32_t*& ids, float* scratch) {
  const int64_t blocks = (n + kRescoreBlock - 1) / kRescoreBlock;
  float *most = scratch, *values = most + blocks;
  ids = reinterpret_cast<int32_t*>(values + n + 16);
  F check = zero();
  each_block(n, kRescoreBlock, [&](int64_t b, int64_t from, int64_t to) { most[b] = row_largest(y + from, to - from, check); });
  // as many blocks as are looked for have a logit from here on, so no more can be needed of the others
  const float floor = blocks > count ? threshold(most, blocks, count) : -__builtin_inff();
  int64_t found = 0;
  each_block(n, kRescoreBlock, [&](int64_t b, int64_t from, int64_t to) {
    if (most[b] >= floor) found += row_collect(y, from, to, floor, __builtin_inff(), ids + found);
  });
  for (int64_t i = 0; i < found; ++i) values[i] = y[ids[i]];
  if (found <= count) return found;
  const float edge = threshold(values, found, count);
  int64_t above = 0, kept = 0;
  for (int64_t i = 0; i < found; ++i) above += values[i] > edge;
  int64_t equals = count - above;  // of those at the edge, the first
  for (int64_t i = 0; i < found; ++i)
    if (values[i] > edge || (values[i] == edge && equals-- > 0)) ids[kept++] = ids[i];
  return kept;
}

// Exact: codes are bytes 0..255, x is -127..127, `width` a multiple of 8.
inline int32_t dot_bytes(const uint8_t* w, const uint8_t* x, int64_t width) {
  I acc = splat_i(0);
  int64_t k = 0;
  for (; k + 64 <= width; k += 64) acc = dot4(acc, load_i(w + k), load_i(x + k));
  if (k < width) {
    alignas(64) uint8_t rest[2][64] = {};
    __builtin_memcpy(rest[0], w + k, static_cast<size_t>(width - k));
    __builtin_memcpy(rest[1], x + k, static_cast<size_t>(width - k));
    acc = dot4(acc, load_i(rest[0]), load_i(rest[1]));
  }
  return sum_i(acc);
}

inline float rescored(const RescoreArgs& a, const uint8_t* w, const uint8_t* x) {
  const Groups groups(a.k, a.group);
  const int64_t codes = padded_k(a.k, a.group);
  const uint8_t *w_scales = w + codes, *x_scales = x + up(codes, 4), *x_sums = x_scales + groups.count * 4;
  float y = 0;
  for (int64_t g = 0; g < groups.count; ++g) {
    uint16_t half;
    float x_scale;
    int32_t x_sum;
    __builtin_memcpy(&half, w_scales + g * 2, 2);
    __builtin_memcpy(&x_scale, x_scales + g * 4, 4);
    __builtin_memcpy(&x_sum, x_sums + g * 4, 4);
    const int32_t dot = dot_bytes(w, x, groups.width(g)) - 128 * x_sum;
    y = __builtin_fmaf(static_cast<float>(dot) * x_scale, half_to_float(half), y);
    w += groups.width(g);
    x += groups.width(g);
  }
  return y;
}

inline void rescore(const RescoreArgs& a, StepContext& c) {
  const int64_t stride = byte_row_bytes(a.k, a.group);
  for (Chunk r(c, c.sizes[a.rows], 1); r.next();) {
    float* y = a.y + r.begin * a.n;
    int32_t* ids;
    const int64_t found = find_largest(y, a.n, a.count, ids, c.scratch);
    for (int64_t i = 0; i < found; ++i) {
      if (i + 2 < found)
        for (int64_t at = 0; at < stride; at += kLine) __builtin_prefetch(a.w + ids[i + 2] * stride + at);
      y[ids[i]] = rescored(a, a.w + ids[i] * stride, a.x + r.begin * a.x_stride);
    }
  }
}

}  // namespace millrace::MILLRACE_ISA
