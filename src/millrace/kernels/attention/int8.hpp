// Attention over int8 pages, in exact integers between roundings that are a row's own.
//   q = scale (256 high + low), 16 bits: what is lost is lost by the keys alone | score = q_scale k_scale (q . k)
//   p times the value's scale = scale (256 high + low), 16 bits relative to the row's largest in a span; l sums p itself
// Both bytes of a row go through the same loop, as if they were two rows.
#pragma once
#include "tile.hpp"

namespace millrace::MILLRACE_ISA {

inline void load_int8_queries(AttentionTile& t) {
  const int D = t.a->head_dim;
  constexpr int kMost = 127 * 256 + 127;  // high and low are both at most 127
  for (int r = 0; r < t.rows; ++r) {
    const float* q = t.a->q + t.tokens[r] * t.a->q_stride + t.heads[r] * D;
    F check = zero();
    const float amax = row_magnitude(q, D, check), inverse = amax > kNothing ? kMost / amax : 0.0f;
    t.int8.q_scale[r] = (amax / kMost + sum(check)) * t.a->scale;
    I sums[2] = {splat_i(0), splat_i(0)};
    for (int d = 0; d < D; d += 16) {  // beyond the head: zeros
      const I code = round(load(q + d, D - d < 16 ? D - d : 16) * splat(inverse));
      const I high = shift_right(code + splat_i(128 + 32768), 8) - splat_i(128);
      const I low = code - shift_left(high, 8);
      store_i8(t.int8.q[r][0] + d, high);
      store_i8(t.int8.q[r][1] + d, low);
      sums[0] = sums[0] + high;
      sums[1] = sums[1] + low;
    }
    for (int part = 0; part < 2; ++part) t.int8.q_sum[r][part] = sum_i(sums[part]);
  }
}

// Scores of R rows against the 64 keys of one page.
template <int R>
void score_int8_page(AttentionTile& t, int row, uint8_t* keys, int at) {
  const float* scales = t.cache->layout.key_scales(keys);
  const int8_t* q = t.int8.q[row][0];
  const KeyLines lines(t, keys, row);
  I acc[R * 2][4];
#pragma GCC unroll 32
  for (int i = 0; i < R * 8; ++i) acc[i / 4][i % 4] = splat_i(-128 * t.int8.q_sum[row + i / 8][i / 4 % 2]);
  for (int d = 0; d < t.a->head_dim; d += 4) {
    I line[4];
    lines.load(line, d * 64);
#pragma GCC unroll 8
    for (int r = 0; r < R * 2; ++r) {
      const I x = splat_bytes(q + r * kMaxHeadDim + d);
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) acc[r][v] = dot4(acc[r][v], line[v], x);
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < R * 4; ++i) {
    const int r = i / 4, v = i % 4;
    const F dot = fma(to_float(acc[2 * r][v]), splat(256.0f), to_float(acc[2 * r + 1][v]));
    store(t.scores[row + r] + at + v * 16, dot * load(scales + v * 16) * splat(t.int8.q_scale[row + r]));
  }
}

// The weights p of one row, 0 from its own end on, times the scales of the values.
inline void to_int8_weights(AttentionTile& t, int r, int from, int count, int span) {
  float* p = t.scores[r];
  F check = zero(), most = zero();
  for (int at = 0; at < count; at += kPageTokens) {
    const float* scales = t.cache->layout.value_scales(block_of(t, from + at));
    each_vector(at, at + kPageTokens < count ? at + kPageTokens : count, [&](int64_t i, auto lanes) {
      const F w = lanes.load(p + i) * lanes.load(scales + i - at);
      lanes.store(p + i, w);
      check = fma(w, zero(), check);
      most = max(w, most);
    });
  }
  const float largest_weight = largest(most), inverse = largest_weight > kNothing ? 65535.0f / largest_weight : 0.0f;
  t.int8.p_scale[r] = largest_weight / 65535.0f + sum(check);
  for (int i = 0; i < span; i += 16) {
    const I code = round(load(p + i) * splat(inverse));
    store_i8(reinterpret_cast<int8_t*>(t.int8.p[r][0]) + i, shift_right(code, 8));
    store_i8(reinterpret_cast<int8_t*>(t.int8.p[r][1]) + i, code);
  }
}

// o = sum of p v over `count` keys of a span that starts at `from`: R rows, NV vectors of the head from column d on.
template <int R, int NV>
void weigh_int8_columns(AttentionTile& t, int row, int from, int count, int64_t d) {
  const int64_t width = t.cache->layout.value_width();
  I acc[R * 2][NV];
#pragma GCC unroll 32
  for (int i = 0; i < R * 2 * NV; ++i) acc[i / NV][i % NV] = splat_i(0);
  for (int at = 0; at < count; at += kPageTokens) {
    const uint8_t* line = block_of(t, from + at) + t.cache->layout.key_bytes() + d * 4;
    const uint8_t* ahead = keys_after(t, from + at, line - d * 4) + d * 4;
    const int end = at + kPageTokens < count ? at + kPageTokens : count;
    for (int i = at; i < end; i += 4, line += width * 4, ahead += width * 4) {
      I values[NV];
      load_lines(values, line, ahead);
#pragma GCC unroll 8
      for (int r = 0; r < R * 2; ++r) {
        const I p = splat_bytes(t.int8.p[row][0] + r * kSpan + i);
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) acc[r][v] = dot4(acc[r][v], p, values[v]);
      }
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < R * NV; ++i) {  // 256 x 65535 x 127 fits
    const int r = i / NV, v = i % NV;
    const F o = to_float(shift_left(acc[2 * r][v], 8) + acc[2 * r + 1][v]);
    store(t.span_out[row + r] + d + v * 16, o * splat(t.int8.p_scale[row + r]));
  }
}

template <int R>
void weigh_int8_values(AttentionTile& t, int row, int from, int count) {
  each_columns(t.cache->layout.value_width(), [&]<int NV>(int64_t d) { weigh_int8_columns<R, NV>(t, row, from, count, d); });
}

}  // namespace millrace::MILLRACE_ISA
