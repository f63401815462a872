// Attention over int8 pages, in exact integers between roundings that are a row's own: codes of 16 bits meet the bytes of
// keys and values (lanes/words.hpp), so what is lost is lost by these.
//   score = q_scale k_scale (q . k) | p times the value's scale, 15 bits relative to the row's largest in a span; l sums p
#pragma once
#include "tile.hpp"

namespace millrace::MILLRACE_ISA {

inline void load_int8_queries(AttentionTile& t) {
  const int D = t.a->head_dim;
  constexpr int kMost = 127 * 256 + 127;  // in two bytes of at most 127 each
  for (int r = 0; r < t.rows; ++r) {
    const float* q = t.a->q + t.tokens[r] * t.a->q_stride + t.heads[r] * D;
    F check = zero();
    const float amax = row_magnitude(q, D, check), inverse = amax > kNothing ? kMost / amax : 0.0f;
    t.int8.q_scale[r] = (amax / kMost + sum(check)) * t.a->scale;
    I sums = splat_i(0);
    for (int d = 0; d < D; d += 16) {  // beyond the head: zeros
      const I code = round(load(q + d, D - d < 16 ? D - d : 16) * splat(inverse));
      store_words<Bytes::biased>(t.int8.q[r][0] + d, t.int8.q[r][1] + d, code);
      sums = sums + code;
    }
    t.int8.q_sum[r] = sum_i(sums);
  }
}

// Scores of R rows against the 64 keys of one page. (The sums may wrap: q_sum brings them back.)
template <int R>
void score_int8_page(AttentionTile& t, int row, uint8_t* keys, int at) {
  const float* scales = t.cache->layout.key_scales(keys);
  const KeyLines lines(t, keys, row);
  if (row == 0) fetch_lines<4>(reinterpret_cast<const uint8_t*>(t.cache->layout.value_scales(keys)));
  for (int v = 0; v < kPageTokens / 16; v += kWordLines) {
    WordSums acc[R][kWordLines];
#pragma GCC unroll 32
    for (int i = 0; i < R * kWordLines; ++i) acc[i / kWordLines][i % kWordLines] = no_words();
    const uint8_t* q = t.int8.q[row][0];
    for (int d = 0; d < t.a->head_dim; d += 4, q += 4) {
      I line[kWordLines];
      lines.load(line, d * 64 + v * 64);
#pragma GCC unroll 4
      for (int w = 0; w < kWordLines; ++w) {
        const Words key = words<Bytes::biased>(line[w]);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
          add_words<Bytes::biased>(acc[r][w], key, q + 2 * r * kMaxHeadDim, q + (2 * r + 1) * kMaxHeadDim);
      }
    }
#pragma GCC unroll 32
    for (int i = 0; i < R * kWordLines; ++i) {
      const int r = i / kWordLines, key = (v + i % kWordLines) * 16;
      const F dot = to_float(total(acc[r][i % kWordLines]) - splat_i(128 * t.int8.q_sum[row + r]));
      store(t.scores[row + r] + at + key, dot * load(scales + key) * splat(t.int8.q_scale[row + r]));
    }
  }
}

// The weights p of one row, times the scales of the values: as floats in the place of its scores, at last as codes.
struct Int8Weights {
  AttentionTile& t;
  const int r, from;
  F check = zero(), most = zero();

  Int8Weights(AttentionTile& t, int r, int from) : t(t), r(r), from(from) {}

  // Sixteen keys from `at` on, of which n are the row's own: scales of others may be anything.
  F operator()(int at, F p, int n) {
    const float* scales = t.cache->layout.value_scales(block_of(t, from + at)) + at % kPageTokens;
    const F w = n == 16 ? p * load(scales) : first(p * load(scales), n, zero());
    store(t.scores[r] + at, w);
    check = fma(w, zero(), check);
    most = max(w, most);
    return p;
  }
  void round_to(int span) {
    constexpr float kMost = 32767.0f;
    const float largest_weight = largest(most), inverse = largest_weight > kNothing ? kMost / largest_weight : 0.0f;
    t.int8.p_scale[r] = largest_weight / kMost + sum(check);
    for (int i = 0; i < span; i += 16)
      store_words<Bytes::plain>(t.int8.p[r][0] + i, t.int8.p[r][1] + i, round(load(t.scores[r] + i) * splat(inverse)));
  }
};

// o = sum of p v over `count` keys of a span that starts at `from`: R rows, NV vectors of the head from column d on.
template <int R, int NV>
void weigh_int8_columns(AttentionTile& t, int row, int from, int count, int64_t d) {
  const int64_t width = t.cache->layout.value_width();
  WordSums acc[R][NV];
#pragma GCC unroll 32
  for (int i = 0; i < R * NV; ++i) acc[i / NV][i % NV] = no_words();
  for (int at = 0; at < count; at += kPageTokens) {
    const uint8_t* line = block_of(t, from + at) + t.cache->layout.key_bytes() + d * 4;
    const uint8_t* ahead = keys_after(t, from + at, line - d * 4) + d * 4;
    if (row == 0 && d == 0) fetch_lines<4>(ahead + t.cache->layout.key_bytes() - kPageTokens * 4);
    const uint8_t *p = t.int8.p[row][0] + at, *end = p + (at + kPageTokens < count ? kPageTokens : count - at);
    for (; p < end; p += 4, line += width * 4, ahead += width * 4) {
      I lines[NV];
      load_lines(lines, line, ahead);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        const Words value = words<Bytes::plain>(lines[v]);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
          add_words<Bytes::plain>(acc[r][v], value, p + 2 * r * kSpan, p + (2 * r + 1) * kSpan);
      }
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < R * NV; ++i) {  // 256 x 32767 x 127 fits
    const int r = i / NV, v = i % NV;
    store(t.span_out[row + r] + d + v * 16, to_float(total(acc[r][v])) * splat(t.int8.p_scale[row + r]));
  }
}

template <int R>
void weigh_int8_values(AttentionTile& t, int row, int from, int count) {
  each_columns<kWordLines>(t.cache->layout.value_width(),
                           [&]<int NV>(int64_t d) { weigh_int8_columns<R, NV>(t, row, from, count, d); });
}

}  // namespace millrace::MILLRACE_ISA
