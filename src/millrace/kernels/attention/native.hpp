// attention   y = softmax(q k^T * scale) v over the keys at positions 0 .. own position, read from the pages of a cache;
//   window: over so many positions, the own one among them | not causal: over all keys of the sequence, which is there whole
//   softcap: a score s is softcap * tanh(s / softcap)
//   distance_bias: to the score of each key a number is added, by the head and the key's distance from the row
//   sinks: to each row's sum of weights, exp(its head's sink - M) is added at last: a key whose value is zero
//   q (T, heads * D) float at q_stride | y (T, heads * Dv) float or packed to bfloat16 | grouped queries: heads / kv_heads share one KV head
//
// A row's bits are a function of its position only. Keys are taken in spans of 256 from position 0, or from the span in
// which the window begins; keys before a window have weight 0, and pages before it are not read. In a span the scores
// come first, then their maximum m, p = exp(score - m), l = sum p (lane i takes keys i, i+16, ...; the fixed tree), and
// o = sum p v over ascending keys (bfloat16: pairs). Spans are merged in order:
//   m' = max(M, m), O = O exp(M - m') + o exp(m - m'), L likewise; at last y = O / L.
// bfloat16 KV: q and p are rounded to bfloat16, and l sums the rounded p; by tiles: tiles.hpp. fp8 KV: the same, where
// E4M3 becomes bfloat16 as it is read, and scales, powers of two, go to scores and to p. int8 and int4 KV: codes.hpp.
#pragma once
#include "codes.hpp"
#include "parts.hpp"
#include "softmax.hpp"
#include "tiles.hpp"

namespace millrace::MILLRACE_ISA {

inline void load_queries(AttentionTile& t) {
  const int D = t.a->head_dim;
  alignas(64) float transformed[kMaxHeadDim];
  for (int r = 0; r < t.rows; ++r) {
    const float* q = as_keys_are(t, t.a->q + t.tokens[r] * t.a->q_stride + t.heads[r] * D, transformed);
    if (t.cache->layout.format == KvFormat::f32) {
      for (int d = 0; d < D; ++d) t.q[r][d] = q[d];
    } else {
      auto* out = reinterpret_cast<uint16_t*>(t.q[r]);
      for (int d = 0; d < D; d += 16) {
        const int n = D - d < 16 ? D - d : 16;
        store_bf16(out + d, load(q + d, n), n);
      }
    }
  }
}

// Of what is no single float, a lane has a pair.
template <KvFormat Format>
constexpr bool kPairs = Format != KvFormat::f32;

// What was summed of lanes as they were read.
template <KvFormat Format>
[[gnu::always_inline]] inline F summed(F acc) {
  return Format == KvFormat::fp8 ? in_order(acc) : acc;
}

// acc[v] += w[v] * x, where x points at a float or at a bfloat16 pair.
template <bool BF16, int NV>
[[gnu::always_inline]] inline void add_products(F (&acc)[NV], const I (&w)[NV], const float* x) {
  const I xs = splat_bytes(x);
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) acc[v] = BF16 ? dot2(acc[v], w[v], xs) : fma(as_float(w[v]), as_float(xs), acc[v]);
}

// Scores of R rows against 64 keys of one page: d ascending, 16 keys a vector.
template <KvFormat Format, int R>
void score_page(AttentionTile& t, int row, uint8_t* keys, int at) {
  constexpr bool BF16 = kPairs<Format>;
  const int steps = BF16 ? t.a->head_dim / 2 : t.a->head_dim;
  const KeyLines lines(t, keys, row);
  F acc[R][4];
#pragma GCC unroll 32
  for (int i = 0; i < R * 4; ++i) acc[i / 4][i % 4] = zero();
  for (int d = 0; d < steps; ++d) {
    I line[4];
    lines.load<Format>(line, d * 4 * kLaneBytes<Format>);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) add_products<BF16>(acc[r], line, reinterpret_cast<const float*>(t.q[row + r]) + d);
  }
#pragma GCC unroll 32
  for (int i = 0; i < R * 4; ++i) {
    F score = summed<Format>(acc[i / 4][i % 4]) * splat(t.a->scale);
    if constexpr (Format == KvFormat::fp8) score = score * load(t.cache->layout.key_scales(keys) + i % 4 * 16);
    store(t.scores[row + i / 4] + at + i % 4 * 16, score);
  }
}

// fp8: the rounded p is summed, and kept times the scales of the row's own values, which are powers of two.
inline void soften_scaled(AttentionTile& t, const SpanScales& scales, int r, Own own, int span, float& m, float& l) {
  soften<true>(t.scores[r], own, span, 1.0f, m, l, [&](int i, F p, int begin, int end) {
    const F rounded = as_float(shift_left(to_bf16(p), 16));
    const F w = begin < end ? among(rounded * load(scales.at(i)), begin, end, zero()) : zero();
    store_u16(reinterpret_cast<uint16_t*>(t.scores[r]) + i, to_bf16(w));
    return rounded;
  });
}

// o = sum of p v over `own` keys of a span that starts at `from`: R rows, NV vectors of the head from column d on.
template <KvFormat Format, int R, int NV>
void weigh_columns(AttentionTile& t, int row, int from, Own own, int64_t d) {
  constexpr bool BF16 = kPairs<Format>;
  constexpr int kColumnBytes = kLaneBytes<Format> / 16;
  const int64_t line_bytes = t.cache->layout.value_width() * kColumnBytes, column = d * kColumnBytes;
  F acc[R][NV];
#pragma GCC unroll 32
  for (int i = 0; i < R * NV; ++i) acc[i / NV][i % NV] = zero();
  for (int page = own.begin / kPageTokens; page * kPageTokens < own.end; ++page) {
    const uint8_t* line = block_of(t, from + page * kPageTokens) + t.cache->layout.key_bytes() + column;
    const uint8_t* ahead = keys_after(t, from + page * kPageTokens, line - column) + column;
    const int keys = own.end - page * kPageTokens < kPageTokens ? own.end - page * kPageTokens : kPageTokens;
    const int before = own.begin > page * kPageTokens ? own.begin - page * kPageTokens : 0;
    const float* weights = t.scores[row] + page * kPageTokens / (BF16 ? 2 : 1);
    const auto add_line = [&] [[gnu::always_inline]] (int i, I mask) {  // called in several places: sums stay in registers
      I values[NV];
      load_lines<Format>(values, line, ahead, t.near);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) values[v] = values[v] & mask;
      line += line_bytes;
      ahead += line_bytes;
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) add_products<BF16>(acc[r], values, weights + r * kSpan + i);
    };
    const int whole = BF16 ? keys / 2 : keys;
    int i = BF16 ? before / 2 : before;
    line += i * line_bytes;
    ahead += i * line_bytes;
    if (BF16 && before % 2) {  // the even neighbour is not in the window
      add_line(i, splat_i(i < whole ? static_cast<int32_t>(0xffff0000) : 0));
      ++i;
    }
    for (; i < whole; ++i) add_line(i, splat_i(-1));
    if (BF16 && keys % 2) add_line(whole, splat_i(0xffff));  // the odd neighbour was never written, or by another
  }
#pragma GCC unroll 32
  for (int i = 0; i < R * NV; ++i) store(t.span_out[row + i / NV] + d + i % NV * 16, summed<Format>(acc[i / NV][i % NV]));
}

template <KvFormat Format, int R>
void weigh_values(AttentionTile& t, int row, int from, Own own) {
  each_columns(t.cache->layout.value_width(), [&]<int NV>(int64_t d) { weigh_columns<Format, R, NV>(t, row, from, own, d); });
}

inline void merge(AttentionTile& t, int r, bool opening, float m, float l) {
  const int64_t width = t.cache->layout.value_width();
  if (opening) {
    t.most[r] = m;
    t.total[r] = l;
    for (int64_t d = 0; d < width; d += 16) store(t.out[r] + d, load(t.span_out[r] + d));
    return;
  }
  const float top = t.most[r] > m ? t.most[r] : m;
  const F keep = exp(splat(t.most[r] - top)), add = exp(splat(m - top));
  float both[16];
  store(both, splat(t.total[r]) * keep + splat(l) * add);
  t.total[r] = both[0];
  t.most[r] = top;
  for (int64_t d = 0; d < width; d += 16) store(t.out[r] + d, load(t.out[r] + d) * keep + load(t.span_out[r] + d) * add);
}

inline bool meets(const AttentionTile& t, int r, int span) {
  return t.positions[r] >= span * kSpan && t.begins[r] < (span + 1) * kSpan;
}

// The keys of row r among the first `reach` of a span; it may have none.
inline Own own_of(const AttentionTile& t, int r, int from, int reach) {
  const int begin = t.begins[r] - from, end = t.positions[r] + 1 - from;
  if (end <= 0 || begin >= reach) return {0, 0};
  return {begin > 0 ? begin : 0, end < reach ? end : reach};
}

template <class Work>
[[gnu::always_inline]] inline void each_own(const AttentionTile& t, int from, int reach, Work work) {
  for (int r = 0; r < t.rows; ++r) work(r, own_of(t, r, from, reach));
}

// Scores of a row saturate. Those that are not its own may be anything.
template <bool SCALED>
inline void cap_scores(AttentionTile& t, int r, Own own) {
  const F cap = splat(t.a->softcap), inverse = splat(SCALED ? 1.0f / t.a->softcap : t.a->scale / t.a->softcap);
  for (int i = own.begin / 16 * 16; i < own.end; i += 16)
    store(t.scores[r] + i, cap * tanh(load(t.scores[r] + i) * inverse));
}

// Adds each key's bias to a row's scores, which are scaled then. The row's token is at a position of its own, from 0 on.
template <bool SCALED>
inline void add_distance_bias(AttentionTile& t, int r, int from, Own own) {
  const int64_t width = t.a->bias_width, position = t.tokens[r] - t.c->sequences.starts[t.sequence];
  const float* bias = t.a->distance_bias + t.heads[r] * width;
  const F scale = splat(SCALED ? 1.0f : t.a->scale);
  for (int i = own.begin / 16 * 16; i < own.end; i += 16) {
    const int64_t at = from + i - position + width / 2;
    F added;
    if (at >= 0 && at + 16 <= width) {
      added = load(bias + at);
    } else {
      float some[16] = {};
      for (int64_t k = 0; k < 16; ++k)
        if (at + k >= 0 && at + k < width) some[k] = bias[at + k];
      added = load(some);
    }
    store(t.scores[r] + i, load(t.scores[r] + i) * scale + added);
  }
}

// How each format takes its steps: `score` and `weigh` for several rows at once. One lives for a tile of rows.
template <KvFormat Format>
struct FloatSteps {
  static constexpr bool kZeroTimesNan = Format != KvFormat::fp8;  // E4M3 is read as numbers, and scales as of CodeSteps
  static constexpr int kTogether = 1;  // keys of which a product takes all or none
  static constexpr bool kScaled = true;  // scores are, by `score`
  explicit FloatSteps(const AttentionTile&) {}
  static void load(AttentionTile& t) { load_queries(t); }
  static void score(AttentionTile& t, uint8_t* block, int at) {
    each_tile<kAttentionTile>(t.rows, 0, [&]<int R>(int row) { score_page<Format, R>(t, row, block, at); });
  }
  static void soften(AttentionTile& t, int from, int reach, int span, float* m, float* l) {
    if constexpr (Format == KvFormat::fp8) {
      const SpanScales scales(t, from, span);
      each_own(t, from, reach, [&](int r, Own own) { soften_scaled(t, scales, r, own, span, m[r], l[r]); });
    } else {
      each_own(t, from, reach, [&](int r, Own own) { soften_floats<kPairs<Format>>(t.scores[r], own, span, 1.0f, m[r], l[r]); });
    }
  }
  static void weigh(AttentionTile& t, int first, int rows, int from, Own own) {
    each_tile<kAttentionTile>(first + rows, first, [&]<int R>(int row) { weigh_values<Format, R>(t, row, from, own); });
  }
};
struct TiledSteps : TileSteps {
  using TileSteps::TileSteps;
  static void load(AttentionTile& t) { load_queries(t); }
  static void soften(AttentionTile& t, int from, int reach, int span, float* m, float* l) {
    const float scale = t.a->softcap != 0 || t.a->distance_bias ? 1.0f : t.a->scale;
    each_own(t, from, reach, [&](int r, Own own) { soften_floats<true, false>(t.scores[r], own, span, scale, m[r], l[r]); });
  }
};
template <KvFormat Format>
struct CodeSteps {
  static constexpr bool kZeroTimesNan = false;  // codes are integers, and scales are taken of the row's own keys alone
  static constexpr int kTogether = kPageTokens;
  static constexpr bool kScaled = true;
  explicit CodeSteps(const AttentionTile&) {}
  static void load(AttentionTile& t) { load_code_queries(t); }
  static void score(AttentionTile& t, uint8_t* block, int at) {
    each_tile<kWordRows>(t.rows, 0, [&]<int R>(int row) { score_code_page<Format, R>(t, row, block, at); });
  }
  static void soften(AttentionTile& t, int from, int reach, int span, float* m, float* l) {
    const SpanScales scales(t, from, span);
    each_own(t, from, reach, [&](int r, Own own) {
      CodeWeights<Format> weights(t, scales, r);
      const KeysMeanwhile keys(t, r, from);
      const auto keep = [&] [[gnu::always_inline]] (int i, F p, int begin, int end) {
        keys.fetch_beside(i);
        return weights(i, p, begin, end);
      };
      MILLRACE_ISA::soften<true>(t.scores[r], own, span, 1.0f, m[r], l[r], keep);
      weights.round_to(span);
    });
  }
  static void weigh(AttentionTile& t, int first, int rows, int from, Own own) {
    each_tile<kWordRows>(first + rows, first, [&]<int R>(int row) { weigh_code_values<Format, R>(t, row, from, own); });
  }
};

// One span of all rows of a tile: o into span_out, maxima into m, sums into l. Rows share their passes over the keys from
// the first row's to the last row's; what lies beyond a row's own has weight 0. Where such a value is not finite 0 times
// it is NaN, and the row is weighed again by itself: a token has no part in what was said before it.
template <class Steps>
void attend_span(AttentionTile& t, int from, float* m, float* l) {
  const int reach = t.last + 1 - from < kSpan ? t.last + 1 - from : kSpan;
  const int span = static_cast<int>(up(reach, kPageTokens));
  for (int at = first_page(t, from); at < span; at += kPageTokens) {
    t.next_keys = keys_beside(t, from + at);
    Steps::score(t, block_of(t, from + at), at);
  }
  if (t.a->softcap != 0) each_own(t, from, reach, [&](int r, Own own) { cap_scores<Steps::kScaled>(t, r, own); });
  if (t.a->distance_bias)
    each_own(t, from, reach, [&](int r, Own own) { add_distance_bias<Steps::kScaled>(t, r, from, own); });
  Steps::soften(t, from, reach, span, m, l);
  const Own all{t.first > from ? (t.first - from) / Steps::kTogether * Steps::kTogether : 0, reach};
  Steps::weigh(t, 0, t.rows, from, all);
  if (!Steps::kZeroTimesNan) return;
  const auto each_short = [&](auto work) {  // rows with fewer keys than all have together
    for (int r = 0; r < t.rows; ++r) {
      const Own own = own_of(t, r, from, reach);
      if (own.begin < own.end && (own.begin > all.begin || own.end < all.end)) work(r, own);
    }
  };
  F check = zero();
  each_short([&](int r, Own) {
    for (int64_t d = 0; d < t.cache->layout.value_width(); d += 16) check = fma(load(t.span_out[r] + d), zero(), check);
  });
  if (sum(check) != 0.0f) each_short([&](int r, Own own) { Steps::weigh(t, r, 1, from, own); });
}

inline void finish(const AttentionTile& t) {
  for (int r = 0; r < t.rows; ++r) {
    const int D = t.a->value_dim;
    const int64_t to = t.tokens[r] * t.a->y_stride + t.heads[r] * D;
    F total = splat(t.total[r]);
    if (t.a->sinks) total = total + exp(splat(t.a->sinks[t.heads[r]] - t.most[r]));
    for (int d = 0; d < D; d += 16) {
      const F value = load(t.out[r] + d) / total;
      const int n = D - d < 16 ? D - d : 16;
      if (t.a->packed)
        store_bf16(reinterpret_cast<uint16_t*>(t.a->y) + to + d, value, n);
      else
        store(t.a->y + to + d, value, n);
    }
  }
}

// Spans [begin, end) of a tile. All of them are merged at once; with a part, each is left in `partials`, and whoever
// computes the last one merges them in their order: the same operations, so the same bits.
template <class Steps>
void attend_tile(AttentionTile& t, const Part& part) {
  const Steps steps(t);
  Steps::load(t);
  float m[kAttentionRows], l[kAttentionRows];
  const int64_t width = t.cache->layout.value_width();
  for (int span = part.begin; span < part.end; ++span) {
    attend_span<Steps>(t, span * kSpan, m, l);
    for (int r = 0; r < t.rows; ++r) {
      if (!meets(t, r, span)) continue;
      if (!part.partials) {
        merge(t, r, span == t.begins[r] / kSpan, m[r], l[r]);
        continue;
      }
      float* partial = part.of(span, r, width);
      __builtin_memcpy(partial, t.span_out[r], static_cast<size_t>(width) * 4);
      partial[width] = m[r];
      partial[width + 1] = l[r];
    }
  }
  const int done = part.end - part.begin;
  if (part.partials) {
    if (__atomic_add_fetch(part.counter, done, __ATOMIC_ACQ_REL) < part.last - part.first) return;
    *part.counter = 0;
    for (int span = part.first; span < part.last; ++span)
      for (int r = 0; r < t.rows; ++r) {
        if (!meets(t, r, span)) continue;
        const float* partial = part.of(span, r, width);
        __builtin_memcpy(t.span_out[r], partial, static_cast<size_t>(width) * 4);
        merge(t, r, span == t.begins[r] / kSpan, partial[width], partial[width + 1]);
      }
  }
  finish(t);
}

inline void attend_part(AttentionTile& t, const Part& part) {
  switch (t.cache->layout.format) {
    case KvFormat::f32: return attend_tile<FloatSteps<KvFormat::f32>>(t, part);
    case KvFormat::bf16: return t.a->tiles ? attend_tile<TiledSteps>(t, part) : attend_tile<FloatSteps<KvFormat::bf16>>(t, part);
    case KvFormat::fp8: return attend_tile<FloatSteps<KvFormat::fp8>>(t, part);
    case KvFormat::int8: return attend_tile<CodeSteps<KvFormat::int8>>(t, part);
    case KvFormat::int4: return attend_tile<CodeSteps<KvFormat::int4>>(t, part);
  }
}

// A task: up to kAttentionRows rows (tokens of one sequence x query heads) of one KV head, or where there are too few of
// these for the workers and the context is long, a part of their spans.
inline void attention(const AttentionArgs& a, StepContext& c) {
  const int group = a.heads / a.kv_heads;
  auto& t = *reinterpret_cast<AttentionTile*>(c.scratch);
  t.a = &a;
  t.c = &c;
  t.cache = &c.caches[a.cache];
  t.near = c.tactic->first_level() != 0;
  const Cut cut = cut_of(a, c);
  Chunk task(c, INT64_MAX / 2, 1);
  task.next();
  int64_t first_task = 0, first_tile = 0;
  for (int s = 0; s < c.sequences.count; ++s) {
    const int parts = cut.parts(a, c, s);
    const int64_t rows = rows_of(a, c, s), tiles = cut.tiles(a, c, s);
    for (; task.begin < first_task + tiles * parts; task.next()) {
      const int64_t tile = (task.begin - first_task) / parts, from = tile / a.kv_heads * cut.tile_rows;
      t.sequence = s;
      t.kv_head = static_cast<int>(tile % a.kv_heads);
      t.rows = static_cast<int>(rows - from < cut.tile_rows ? rows - from : cut.tile_rows);
      t.first = INT32_MAX;
      t.last = 0;
      for (int r = 0; r < t.rows; ++r) {
        t.tokens[r] = c.sequences.starts[s] + (from + r) / group;
        t.heads[r] = t.kv_head * group + static_cast<int>((from + r) % group);
        t.positions[r] = a.causal ? c.sequences.positions[t.tokens[r]] : last_position(c, s);
        t.begins[r] = window_begin(a, t.positions[r]);
        t.first = t.begins[r] < t.first ? t.begins[r] : t.first;
        t.last = t.positions[r] > t.last ? t.positions[r] : t.last;
      }
      const Part part = cut.part(t, first_tile + tile, static_cast<int>((task.begin - first_task) % parts), parts);
      if (part.begin == part.end) continue;
      t.begin = part.begin * kSpan;
      t.end = part.end == part.last ? t.last + 1 : part.end * kSpan;
      attend_part(t, part);
    }
    first_task += tiles * parts;
    first_tile += tiles;
  }
}

}  // namespace millrace::MILLRACE_ISA
