// Long contexts of few rows: the spans of a tile are shared out, so that every worker has some.
#pragma once
#include "tile.hpp"

namespace millrace::MILLRACE_ISA {

constexpr int kSplitSpans = 4;  // fewer are not worth it

// Spans [begin, end) of `spans`. `partials` is null where one worker does them all.
struct Part {
  int begin, end, spans;
  int32_t* counter;  // spans that are done
  float* partials;   // (spans, kAttentionRows, width + 16): o, then m and l

  float* of(int span, int row, int64_t width) const {
    return partials + (span * kAttentionRows + row) * (width + 16);
  }
};

// Of one sequence: query rows that share a KV head, and tiles of them over all KV heads.
inline int64_t rows_of(const AttentionArgs& a, const StepContext& c, int s) {
  return static_cast<int64_t>(c.sequences.starts[s + 1] - c.sequences.starts[s]) * (a.heads / a.kv_heads);
}
inline int64_t tiles_of(const AttentionArgs& a, const StepContext& c, int s) {
  return (rows_of(a, c, s) + kAttentionRows - 1) / kAttentionRows * a.kv_heads;
}

inline int last_position(const StepContext& c, int s) { return c.sequences.positions[c.sequences.starts[s + 1] - 1]; }
inline int spans_to(int position) { return position / kSpan + 1; }

// Floats for the partial results of one tile: only fewer than two tiles a worker are ever cut.
inline int64_t room_of(const StepContext& c) {
  return (c.shared_bytes / 4 - kSharedCounters) / (2 * c.n_workers) / 16 * 16;
}

// Into how many parts each tile is cut.
inline int parts_of(const AttentionArgs& a, const StepContext& c) {
  int64_t tiles = 0;
  int spans = 0;
  for (int s = 0; s < c.sequences.count; ++s) {
    tiles += tiles_of(a, c, s);
    const int own = spans_to(last_position(c, s));
    spans = own > spans ? own : spans;
  }
  const int64_t floats = static_cast<int64_t>(spans) * kAttentionRows * (c.caches[a.cache].layout.value_width() + 16);
  const bool few = c.n_workers > 1 && tiles < 2 * c.n_workers && tiles <= kSharedCounters;
  if (!few || spans < kSplitSpans || floats > room_of(c)) return 1;
  return static_cast<int>((4 * c.n_workers + tiles - 1) / tiles);
}

inline Part part_of(const AttentionTile& t, int64_t tile, int part, int parts) {
  const int spans = spans_to(t.last);
  if (parts == 1) return {0, spans, spans, nullptr, nullptr};
  auto* counters = reinterpret_cast<int32_t*>(t.c->shared);
  float* partials = reinterpret_cast<float*>(t.c->shared) + kSharedCounters + tile * room_of(*t.c);
  return {spans * part / parts, spans * (part + 1) / parts, spans, counters + tile, partials};
}

}  // namespace millrace::MILLRACE_ISA
