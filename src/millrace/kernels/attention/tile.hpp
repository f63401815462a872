// What a task of attention works on: up to 16 query rows of one KV head, and their scores against a span of keys.
#pragma once
#include "convert/hadamard.hpp"

namespace millrace::MILLRACE_ISA {

constexpr int kSpan = 256;            // keys between two merges: four pages
#if defined(MILLRACE_TILES)
constexpr int kAttentionRows = 16;    // query rows that share one pass over keys and values,
#else
constexpr int kAttentionRows = 12;
#endif
constexpr int kAttentionTile = 6;     // at most so many of them with their sums in registers

// The same rows as codes of 16 bits, whose halves lie apart (lanes/words.hpp): queries, and the weights of a span.
struct CodeRows {
  alignas(64) uint8_t q[kAttentionRows][2][kMaxHeadDim];
  int32_t q_sum[kAttentionRows];
  float q_scale[kAttentionRows];
  alignas(64) uint8_t p[kAttentionRows][2][kSpan];
  float p_scale[kAttentionRows], p_offset[kAttentionRows];
};

struct AttentionTile {
  const AttentionArgs* a;
  StepContext* c;
  const Cache* cache;
  int sequence, kv_head;
  int rows, first, last;  // first: where the earliest row's window begins; last: the largest position
  int begin, end;  // of the keys that its task takes
  const uint8_t* next_keys;  // what is fetched besides values while a page's keys are read, or null
  bool near;                 // into the first level of caches
  int begins[kAttentionRows];     // from where a row attends: 0, or where its window begins
  int positions[kAttentionRows];  // up to which it does: its own, or its sequence's last
  int64_t tokens[kAttentionRows];
  int heads[kAttentionRows];
  float scores[kAttentionRows][kSpan];
  float out[kAttentionRows][kMaxHeadDim], span_out[kAttentionRows][kMaxHeadDim];
  float most[kAttentionRows], total[kAttentionRows];
  alignas(64) float q[kAttentionRows][kMaxHeadDim];  // float, or bfloat16 pairs in the first half
  CodeRows codes;
};

// A query as it meets the cache's keys, which lie as they are or transformed; `room` for that.
inline const float* as_keys_are(const AttentionTile& t, const float* q, float* room) {
  if (!t.cache->layout.kind().transformed) return q;
  hadamard_group(q, t.a->head_dim, room);
  return room;
}

inline uint8_t* block_of(const AttentionTile& t, int position) {
  return t.cache->block(t.a->layer, t.sequence, position, t.kv_head);
}

// The page of a span in which a tile's first key lies: earlier pages may be another sequence's by now, and are not read.
inline int first_page(const AttentionTile& t, int from) {
  return t.first > from ? (t.first - from) / kPageTokens * kPageTokens : 0;
}

// The scales of values that a span's weights meet; each page's is looked up once.
struct SpanScales {
  const float* pages[kSpan / kPageTokens];

  SpanScales(const AttentionTile& t, int from, int span) {
    for (int at = first_page(t, from); at < span; at += kPageTokens)
      pages[at / kPageTokens] = t.cache->layout.value_scales(block_of(t, from + at));
  }
  [[gnu::always_inline]] const float* at(int key) const {
    const auto place = static_cast<unsigned>(key);
    return pages[place / kPageTokens] + place % kPageTokens;
  }
};

// The keys of a span that count for some rows: a row's own, or those of all together: [begin, end).
struct Own {
  int begin, end;
};

// x in the lanes from `begin` to `end`, `other` in the rest.
[[gnu::always_inline]] inline F among(F x, int begin, int end, F other) {
  const F below = end < 16 ? first(x, end, other) : x;
  return begin > 0 ? first(other, begin, below) : below;
}

// Pages lie apart, so the hardware does not see what is read next. While keys are read, the values behind them are
// fetched, and in a task's first span the next page's keys; while values are read, the keys of the task's next span:
inline const uint8_t* keys_after(const AttentionTile& t, int position, const uint8_t* otherwise) {
  return position + kSpan < t.end ? block_of(t, position + kSpan) : otherwise;
}
inline const uint8_t* keys_beside(const AttentionTile& t, int position) {
  const int next = position + kPageTokens;
  return next < t.end && position < t.begin + kSpan ? block_of(t, next) : nullptr;
}

// Into the second level, or near, into the first. Which has more lines on their way at once is a processor's own: the
// second takes 10 to 16 % less time of decode at 4,096 tokens on Sapphire Rapids, the first 9 % less on Zen 5.
template <int NV>
[[gnu::always_inline]] inline void fetch_lines(const uint8_t* ahead, bool near) {
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v)
    if (near)
      __builtin_prefetch(ahead + v * 64, 0, 3);
    else
      __builtin_prefetch(ahead + v * 64, 0, 2);
}

// Finding a row's weights over integers reads nothing from memory, and takes about as long as a page needs to come. So
// row r fetches the keys of page r of the task's next span, a sixteenth beside each sixteen weights.
struct KeysMeanwhile {
  static_assert(kSpan == 16 * 16);
  const uint8_t* page = nullptr;
  const unsigned lines;
  const bool near;

  KeysMeanwhile(const AttentionTile& t, int row, int from)
      : lines(static_cast<unsigned>(t.cache->layout.key_bytes() / 64)), near(t.near) {
    const int position = from + kSpan + row * kPageTokens;
    if (row < kSpan / kPageTokens && position < t.end) page = block_of(t, position);
  }
  [[gnu::always_inline]] void fetch_beside(int weight) const {
    if (!page) return;
    const unsigned part = static_cast<unsigned>(weight) / 16;
    for (unsigned line = part * lines / 16; line < (part + 1) * lines / 16; ++line) fetch_lines<1>(page + line * 64, near);
  }
};

// The bytes of sixteen lanes: of E4M3 they become bfloat16 pairs as they are read.
template <KvFormat Format>
constexpr int kLaneBytes = Format == KvFormat::fp8 ? 32 : 64;

// Lines that are read now, and fetches of as many further on.
template <KvFormat Format, int NV>
[[gnu::always_inline]] inline void load_lines(I (&lines)[NV], const uint8_t* now, const uint8_t* ahead, bool near) {
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v)
    if constexpr (Format == KvFormat::fp8)
      lines[v] = load_e4m3(now + v * 32);
    else
      lines[v] = load_i(now + v * 64);
  fetch_lines<(NV * kLaneBytes<Format> + 63) / 64>(ahead, near);
}

// Lines of a page's keys. The first rows of a tile fetch the next page's too.
struct KeyLines {
  const uint8_t *keys, *values, *next;
  const bool near;

  KeyLines(const AttentionTile& t, const uint8_t* keys, int row)
      : keys(keys), values(keys + t.cache->layout.key_bytes()), next(row ? nullptr : t.next_keys), near(t.near) {}
  template <KvFormat Format, int NV>
  [[gnu::always_inline]] void load(I (&lines)[NV], int64_t at) const {
    load_lines<Format>(lines, keys + at, values + at, near);
    if (next) fetch_lines<(NV * kLaneBytes<Format> + 63) / 64>(next + at, near);
  }
  template <KvFormat Format>
  [[gnu::always_inline]] I load(int64_t at) const {
    I line[1];
    load<Format>(line, at);
    return line[0];
  }
};

// work.operator()<NV>(d) for the columns of a head, NV vectors of 16 from column d on, at most `Most`.
template <int Most = 4, class Work>
inline void each_columns(int64_t width, Work work) {
  int64_t d = 0;
  if constexpr (Most >= 4)
    for (; d + 64 <= width; d += 64) work.template operator()<4>(d);
  if constexpr (Most >= 2)
    for (; d + 32 <= width; d += 32) work.template operator()<2>(d);
  for (; d < width; d += 16) work.template operator()<1>(d);
}

// work.operator()<R>(row) for the rows in tiles of nearly equal height R, at most `Tile`.
template <int Tile, int R = Tile, class Work>
inline void each_tile(int rows, int row, Work work) {
  if constexpr (R > 1) {
    const int tiles = (rows - row + Tile - 1) / Tile;
    const int height = tiles ? (rows - row + tiles - 1) / tiles : 0;
    if (height < R) return each_tile<Tile, R - 1>(rows, row, work);
  }
  if (row >= rows) return;
  work.template operator()<R>(row);
  each_tile<Tile, R>(rows, row + R, work);
}

}  // namespace millrace::MILLRACE_ISA
