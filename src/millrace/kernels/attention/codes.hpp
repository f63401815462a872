// Attention over pages of integers, in exact integers between roundings that are a row's own: codes of 16 bits meet the
// bytes of keys and values (lanes/words.hpp), so what is lost is lost by these. Of int4 each half of a byte is one.
//   int8  score = q_scale k_scale (q . k) | p times the value's scale, 15 bits relative to the row's largest in a span; l sums p
//   int4  score = q_scale (k_scale (q . k) + k_least sum(q)) | the same p; o takes the sum of p v_least besides
#pragma once
#include "tile.hpp"

namespace millrace::MILLRACE_ISA {

inline void load_code_queries(AttentionTile& t) {
  const int D = t.a->head_dim;
  constexpr int kMost = 127 * 256 + 127;  // in two bytes of at most 127 each
  alignas(64) float transformed[kMaxHeadDim];
  for (int r = 0; r < t.rows; ++r) {
    const float* q = as_keys_are(t, t.a->q + t.tokens[r] * t.a->q_stride + t.heads[r] * D, transformed);
    F check = zero();
    const float amax = row_magnitude(q, D, check), inverse = amax > kNothing ? kMost / amax : 0.0f;
    t.codes.q_scale[r] = (amax / kMost + sum(check)) * t.a->scale;
    I sums = splat_i(0);
    for (int d = 0; d < D; d += 16) {  // beyond the head: zeros
      const I code = round(load(q + d, D - d < 16 ? D - d : 16) * splat(inverse));
      store_words<Bytes::biased>(t.codes.q[r][0] + d, t.codes.q[r][1] + d, code);
      sums = sums + code;
    }
    t.codes.q_sum[r] = sum_i(sums);
  }
}

inline I lower_halves(I bytes) { return bytes & splat_i(0x0f0f0f0f); }
inline I upper_halves(I bytes) { return shift_right(bytes, 4) & splat_i(0x0f0f0f0f); }

// Scores of R rows against the 64 keys of one page. (Sums of int8 may wrap: q_sum brings them back.)
template <KvFormat Format, int R>
void score_code_page(AttentionTile& t, int row, uint8_t* keys, int at) {
  constexpr bool kNibbles = Format == KvFormat::int4;
  const float* scales = t.cache->layout.key_scales(keys);
  const KeyLines lines(t, keys, row);
  if (row == 0) fetch_lines<kNibbles ? 8 : 4>(reinterpret_cast<const uint8_t*>(t.cache->layout.value_scales(keys)), t.near);
  for (int v = 0; v < kPageTokens / 16; v += kWordLines) {
    WordSums acc[R][kWordLines];
#pragma GCC unroll 32
    for (int i = 0; i < R * kWordLines; ++i) acc[i / kWordLines][i % kWordLines] = no_words();
    const uint8_t* q = t.codes.q[row][0];
    const auto add_four = [&](auto bytes_of) {  // elements of the head
#pragma GCC unroll 4
      for (int w = 0; w < kWordLines; ++w) {
        const Words key = words<Bytes::biased>(bytes_of(w));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
          add_words<Bytes::biased>(acc[r][w], key, q + 2 * r * kMaxHeadDim, q + (2 * r + 1) * kMaxHeadDim);
      }
      q += 4;
    };
    for (int d = 0; d < t.a->head_dim; d += kNibbles ? 8 : 4) {
      if constexpr (kNibbles) {
        I line[kWordLines];
        lines.load<Format>(line, d * 32 + v * 64);
        add_four([&](int w) { return lower_halves(line[w]); });
        add_four([&](int w) { return upper_halves(line[w]); });
      } else {
        add_four([&](int w) { return lines.load<Format>(d * 64 + (v + w) * 64); });
      }
    }
#pragma GCC unroll 32
    for (int i = 0; i < R * kWordLines; ++i) {
      const int r = i / kWordLines, key = (v + i % kWordLines) * 16;
      const I sums = total(acc[r][i % kWordLines]);
      F dot;
      if constexpr (kNibbles)
        dot = fma(to_float(sums), load(scales + key), load(scales + kPageTokens + key) * to_float(splat_i(t.codes.q_sum[row + r])));
      else
        dot = to_float(sums - splat_i(128 * t.codes.q_sum[row + r])) * load(scales + key);
      store(t.scores[row + r] + at + key, dot * splat(t.codes.q_scale[row + r]));
    }
  }
}

// The weights p of one row, times the scales of the values: as floats in the place of its scores, at last as codes.
template <KvFormat Format>
struct CodeWeights {
  AttentionTile& t;
  const SpanScales& scales_of;
  const int r;
  F check = zero(), most = zero(), offset = zero();

  CodeWeights(AttentionTile& t, const SpanScales& scales_of, int r) : t(t), scales_of(scales_of), r(r) {}

  // Sixteen keys from `at` on, of which those from `begin` to `end` are the row's own: scales of others may be anything.
  [[gnu::always_inline]] F operator()(int at, F p, int begin, int end) {
    if (begin == end) {
      store(t.scores[r] + at, zero());
      return p;
    }
    const float* scales = scales_of.at(at);
    const F w = among(p * load(scales), begin, end, zero());
    store(t.scores[r] + at, w);
    check = fma(w, zero(), check);
    most = max(w, most);
    if constexpr (Format == KvFormat::int4) offset = offset + among(p * load(scales + kPageTokens), begin, end, zero());
    return p;
  }
  void round_to(int span) {
    constexpr float kMost = 32767.0f;
    const float largest_weight = largest(most), inverse = largest_weight > kNothing ? kMost / largest_weight : 0.0f;
    t.codes.p_scale[r] = largest_weight / kMost + sum(check);
    t.codes.p_offset[r] = sum(offset);
    for (int i = 0; i < span; i += 16)
      store_words<Bytes::plain>(t.codes.p[r][0] + i, t.codes.p[r][1] + i, round(load(t.scores[r] + i) * splat(inverse)));
  }
};

// NV vectors of a line of values, from column d on. Bytes are read one vector at a time: beside the sums of three rows the
// registers hold no more.
template <KvFormat Format, int NV>
struct Values {
  const uint8_t *now, *ahead;
  const bool near;

  Values(const uint8_t* now, const uint8_t* ahead, int64_t, bool near) : now(now), ahead(ahead), near(near) {}
  [[gnu::always_inline]] I operator[](int v) const {
    I value[1];
    load_lines<Format>(value, now + v * 64, ahead + v * 64, near);
    return value[0];
  }
};
template <int NV>
struct Values<KvFormat::int4, NV> {
  I both[(NV + 1) / 2];
  const bool upper;

  [[gnu::always_inline]] Values(const uint8_t* now, const uint8_t* ahead, int64_t d, bool near) : upper(d % 32 != 0) {
    load_lines<KvFormat::int4>(both, now, ahead, near);
  }
  [[gnu::always_inline]] I operator[](int v) const {
    return (NV > 1 ? v % 2 : upper) ? upper_halves(both[v / 2]) : lower_halves(both[v / 2]);
  }
};

// o = sum of p v over `own` keys of a span that starts at `from`: R rows, NV vectors of the head from column d on. The
// first lies at a page's begin.
template <KvFormat Format, int R, int NV>
void weigh_code_columns(AttentionTile& t, int row, int from, Own own, int64_t d) {
  constexpr bool kNibbles = Format == KvFormat::int4;
  const int64_t line_bytes = t.cache->layout.value_width() * (kNibbles ? 2 : 4), column = kNibbles ? d / 32 * 64 : d * 4;
  constexpr int kScaleLines = kNibbles ? 8 : 4;
  WordSums acc[R][NV];
#pragma GCC unroll 32
  for (int i = 0; i < R * NV; ++i) acc[i / NV][i % NV] = no_words();
  for (int at = own.begin; at < own.end; at += kPageTokens) {
    const uint8_t* line = block_of(t, from + at) + t.cache->layout.key_bytes() + column;
    const bool fetched = at < t.rows * kPageTokens;  // while weights were found
    const uint8_t* ahead = (fetched ? line - column : keys_after(t, from + at, line - column)) + column;
    if (row == 0 && d == 0) fetch_lines<kScaleLines>(ahead + t.cache->layout.key_bytes() - kScaleLines * 64, t.near);
    const uint8_t *p = t.codes.p[row][0] + at, *end = p + (at + kPageTokens < own.end ? kPageTokens : own.end - at);
    for (; p < end; p += 4, line += line_bytes, ahead += line_bytes) {
      const Values<Format, NV> values(line, ahead, d, t.near);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        const Words value = words<Bytes::plain>(values[v]);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
          add_words<Bytes::plain>(acc[r][v], value, p + 2 * r * kSpan, p + (2 * r + 1) * kSpan);
      }
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < R * NV; ++i) {  // 256 x 32767 x 127 fits
    const int r = row + i / NV, v = i % NV;
    const F o = to_float(total(acc[i / NV][v])) * splat(t.codes.p_scale[r]);
    store(t.span_out[r] + d + v * 16, kNibbles ? o + splat(t.codes.p_offset[r]) : o);
  }
}

template <KvFormat Format, int R>
void weigh_code_values(AttentionTile& t, int row, int from, Own own) {
  each_columns<kWordLines>(t.cache->layout.value_width(),
                           [&]<int NV>(int64_t d) { weigh_code_columns<Format, R, NV>(t, row, from, own, d); });
}

}  // namespace millrace::MILLRACE_ISA
