// Attention over keys and values in bfloat16 with the sums of AMX's tdpbf16ps (matmul/tiles.hpp): a score is summed over
// 32 elements of the head at a time, o over 32 keys of its span at a time. Pages lie as tiles are read: lines of pairs.
#pragma once
#include "matmul/native.hpp"
#include "tile.hpp"

namespace millrace::MILLRACE_ISA {

constexpr int kTileKeys = 32;  // and elements of a head, in one product of tiles

// A row of queries or of weights: each of its floats is a pair of bfloat16 by now.
inline const uint8_t* pairs(const float* row) { return reinterpret_cast<const uint8_t*>(row); }

// Scores of row r against 64 keys of one page.
inline void score_row_by_tiles(AttentionTile& t, int r, const uint8_t* keys, int at) {
  const int n_lines = t.a->head_dim / 2;
  F acc[1][4];
  fill(acc, zero());
  for (int d = 0; d < n_lines; d += kTileLines)
    add_pairs(acc, n_lines - d < kTileLines ? n_lines - d : kTileLines, pairs(t.q[r] + d), 0,
              [&](int64_t k, int v) { return load_i(keys + (d + k) * 256 + v * 64); });
  for (int v = 0; v < 4; ++v) store(t.scores[r] + at + v * 16, acc[0][v]);  // `soften` scales them
}

// o of row r, 16 columns from d on, over `own` keys of the span that starts at `from`.
inline void weigh_row_by_tiles(AttentionTile& t, int r, int from, Own own, int64_t d) {
  const int64_t line_bytes = t.cache->layout.value_width() * 4;
  F acc[1][1] = {{zero()}};
  for (int at = own.begin / kTileKeys * kTileKeys; at < own.end; at += kTileKeys) {
    const int keys = own.end - at < kTileKeys ? own.end - at : kTileKeys;
    const uint8_t* values = block_of(t, from + at) + t.cache->layout.key_bytes() + at % kPageTokens / 2 * line_bytes + d * 4;
    add_pairs(acc, (keys + 1) / 2, pairs(t.scores[r] + at / 2), 0, [&](int64_t k, int) {
      const uint32_t even = at + 2 * k >= own.begin ? 0xffff : 0, odd = 2 * k + 1 < keys && at + 2 * k + 1 >= own.begin;
      return load_i(values + k * line_bytes) & splat_i(static_cast<int32_t>(even | odd * 0xffff0000));
    });
  }
  store(t.span_out[r] + d, acc[0][0]);
}

#if defined(MILLRACE_TILES)

// Later rows of a sequence find its keys and values in the caches.
inline bool reads_first(const AttentionTile& t) { return t.tokens[0] == t.c->sequences.starts[t.sequence]; }

// Scores of all rows against 64 keys of one page; the head is a multiple of 32.
inline void score_by_tiles(AttentionTile& t, const uint8_t* keys, int at) {
  const int64_t ahead = reads_first(t) ? t.cache->layout.key_bytes() : 0;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int d = 0; d < t.a->head_dim; d += kTileKeys, keys += 256 * kTileLines) {
    if (ahead)
      for (int64_t line = 0; line < 256 * kTileLines; line += kLine) __builtin_prefetch(keys + ahead + line);
    _tile_loadd(4, t.q[0] + d / 2, sizeof t.q[0]);
    _tile_loadd(6, keys, 256);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, keys + 64, 256);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, keys + 128, 256);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, keys + 192, 256);
    _tile_dpbf16ps(3, 4, 7);
  }
  float* scores = t.scores[0] + at;
  _tile_stored(0, scores, sizeof t.scores[0]);
  _tile_stored(1, scores + 16, sizeof t.scores[0]);
  _tile_stored(2, scores + 32, sizeof t.scores[0]);
  _tile_stored(3, scores + 48, sizeof t.scores[0]);
  Tiles::fence();
}

// Lines of values that end among others: zeros lie behind them, and in the place of an odd neighbour.
struct LastValues {
  alignas(64) uint8_t bytes[kTileLines * 64];

  LastValues(const uint8_t* values, int64_t line_bytes, int keys) {
    for (int k = 0; k < kTileLines; ++k)
      store_i(bytes + k * 64, 2 * k < keys ? load_i(values + k * line_bytes) & splat_i(2 * k + 1 < keys ? -1 : 0xffff)
                                           : splat_i(0));
  }
};

// o of all rows, 32 columns from d on or, where the head ends there, 16. The first of `own` begins a product.
template <bool kTwo>
void weigh_by_tiles(AttentionTile& t, int from, Own own, int64_t d) {
  const int64_t line_bytes = t.cache->layout.value_width() * 4;
  _tile_zero(0);
  if (kTwo) _tile_zero(1);
  for (int at = own.begin; at < own.end; at += kTileKeys) {
    const int keys = own.end - at;
    const uint8_t* block = block_of(t, from + at) + t.cache->layout.key_bytes();
    const uint8_t* values = block + at % kPageTokens / 2 * line_bytes + d * 4;
    if (reads_first(t)) {
      const uint8_t* ahead = keys_after(t, from + at, block) + (values - block);
      for (int k = 0; k < kTileLines; ++k) __builtin_prefetch(ahead + k * line_bytes);
      if (kTwo)
        for (int k = 0; k < kTileLines; ++k) __builtin_prefetch(ahead + 64 + k * line_bytes);
    }
    _tile_loadd(4, t.scores[0] + at / 2, sizeof t.scores[0]);
    if (keys >= kTileKeys) {
      _tile_loadd(6, values, line_bytes);
      if (kTwo) _tile_loadd(7, values + 64, line_bytes);
    } else {
      const LastValues last(values, line_bytes, keys), next(values + (kTwo ? 64 : 0), line_bytes, keys);
      Tiles::fence();
      _tile_loadd(6, last.bytes, 64);
      if (kTwo) _tile_loadd(7, next.bytes, 64);
    }
    _tile_dpbf16ps(0, 4, 6);
    if (kTwo) _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, t.span_out[0] + d, sizeof t.span_out[0]);
  if (kTwo) _tile_stored(1, t.span_out[0] + d + 16, sizeof t.span_out[0]);
  Tiles::fence();
}

#endif

// How the sums of tiles take their steps; see native.hpp.
struct TileSteps {
#if defined(MILLRACE_TILES)
  Tiles tiles;
  explicit TileSteps(const AttentionTile& t) : tiles(t.rows, t.rows) {}
#else
  explicit TileSteps(const AttentionTile&) {}
#endif
  static constexpr bool kZeroTimesNan = true;
  static constexpr int kTogether = kTileKeys;
  static constexpr bool kScaled = false;

  static void score(AttentionTile& t, uint8_t* block, int at) {
#if defined(MILLRACE_TILES)
    if (t.a->head_dim % kTileKeys == 0) return score_by_tiles(t, block, at);
#endif
    for (int r = 0; r < t.rows; ++r) score_row_by_tiles(t, r, block, at);
  }

  static void weigh(AttentionTile& t, int first, int rows, int from, Own own) {
    const int64_t width = t.cache->layout.value_width();
#if defined(MILLRACE_TILES)
    if (rows == t.rows && own.begin % kTileKeys == 0) {
      int64_t d = 0;
      for (; d + 32 <= width; d += 32) weigh_by_tiles<true>(t, from, own, d);
      if (d < width) weigh_by_tiles<false>(t, from, own, d);
      return;
    }
#endif
    for (int r = first; r < first + rows; ++r)
      for (int64_t d = 0; d < width; d += 16) weigh_row_by_tiles(t, r, from, own, d);
  }
};

}  // namespace millrace::MILLRACE_ISA
