// convert   y = x in the row format of a matrix product: bfloat16 or int8, group by group, each zero-padded to 8
//   int8: scale = amax / 127, code = nearest(x * (127 / amax)); an amax up to kNothing gives scale 0 and codes 0, since
//   the factor to these would be infinite. A group with an element
//   that is not finite has the scale NaN, so that what follows of it is seen to be nothing
//   int8 by Hadamard: the same of each group times a Hadamard matrix (hadamard.hpp)
//   x (rows, n) float | y (rows, y_stride bytes): codes, then a float scale and an int32 sum of codes per group
#pragma once
#include "hadamard.hpp"
namespace millrace::MILLRACE_ISA {

inline void to_bf16_row(const float* x, int64_t n, int64_t group, uint8_t* y) {
  auto* out = reinterpret_cast<uint16_t*>(y);
  const int64_t size = group ? group : n, padded = group ? up(group, 8) : n;
  for (int64_t from = 0; from < n; from += size, out += padded) {
    const int64_t count = from + size < n ? size : n - from, width = up(count, group ? 8 : 2);
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) store_u16(out + i, to_bf16(load(x + from + i)));
    uint16_t tail[16];
    store_u16(tail, to_bf16(load(x + from + i, static_cast<int>(count - i))));
    __builtin_memcpy(out + i, tail, 2 * (width - i));
  }
}

template <bool kHadamard>
void to_q8_row(const float* x, int64_t n, int64_t group, uint8_t* y) {
  alignas(64) float transformed[kHadamard ? kMostHadamard : 1];
  const int64_t groups = n_groups(n, group), size = group ? group : n, padded = group ? up(group, 8) : n;
  auto* scales = reinterpret_cast<float*>(y + up(padded_k(n, group), 4));
  auto* sums = reinterpret_cast<int32_t*>(scales + groups);
  for (int64_t g = 0; g < groups; ++g) {
    const float* from = x + g * size;
    const int64_t count = (g + 1) * size < n ? size : n - g * size, width = up(count, group ? 8 : 2);
    auto* out = reinterpret_cast<int8_t*>(y + g * padded);
    if constexpr (kHadamard) {
      hadamard_group(from, count, transformed);
      from = transformed;
    }
    F check = zero();
    const float amax = row_magnitude(from, count, check);
    scales[g] = (amax <= kNothing ? 0.0f : amax / 127.0f) + sum(check);
    int64_t i = 0;
    const F inverse = splat(amax > kNothing ? 127.0f / amax : 0.0f);
    I total = splat_i(0);
    for (i = 0; i + 16 <= count; i += 16) {
      const I code = round(load(from + i) * inverse);
      store_i8(out + i, code);
      total = total + code;
    }
    int8_t tail[16];
    const I code = round(load(from + i, static_cast<int>(count - i)) * inverse);
    store_i8(tail, code);
    __builtin_memcpy(out + i, tail, width - i);
    int32_t lanes[16], s = 0;
    store_i(lanes, total + code);
    for (int j = 0; j < 16; ++j) s += lanes[j];
    sums[g] = s;
  }
}

inline void store_row(const float* x, int64_t n, int32_t format, int64_t group, uint8_t* y) {
  if (format == 1)
    to_bf16_row(x, n, group, y);
  else if (format == 2)
    to_q8_row<false>(x, n, group, y);
  else if (format == 3)
    to_q8_row<true>(x, n, group, y);
}

inline void convert(const ConvertArgs& a, StepContext& c) {
  for (Chunk t(c, c.sizes[a.rows], 4); t.next();)
    for (int64_t row = t.begin; row < t.end; ++row)
      store_row(a.x + row * a.x_stride, a.n, a.format, a.group, a.y + row * a.y_stride);
}

}  // namespace millrace::MILLRACE_ISA
