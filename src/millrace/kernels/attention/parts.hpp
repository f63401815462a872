// How a step's attention is cut into tasks: rows of a sequence into tiles, and where these are too few for the workers,
// the spans of a tile too. Whoever computes what, the bits are the same.
#pragma once
#include "tile.hpp"

namespace millrace::MILLRACE_ISA {

constexpr int kWorkerTasks = 4;  // for each worker, at least, where contexts are long enough
constexpr int kSplitSpans = 4;   // fewer are not worth it

// Spans [begin, end) of [first, last). `partials` is null where one worker does them all.
struct Part {
  int begin, end, first, last;
  int32_t* counter;  // spans that are done
  float* partials;   // (spans, rows, width + 16): o, then m and l
  int64_t rows;

  float* of(int span, int row, int64_t width) const { return partials + ((span - first) * rows + row) * (width + 16); }
};

inline int last_position(const StepContext& c, int s) { return c.sequences.positions[c.sequences.starts[s + 1] - 1]; }
inline int spans_to(int position) { return position / kSpan + 1; }

// From where the row at a position attends.
inline int window_begin(const AttentionArgs& a, int position) {
  return a.window && position >= a.window ? position - a.window + 1 : 0;
}

// Query rows of one sequence that share a KV head.
inline int64_t rows_of(const AttentionArgs& a, const StepContext& c, int s) {
  return static_cast<int64_t>(c.sequences.starts[s + 1] - c.sequences.starts[s]) * (a.heads / a.kv_heads);
}

struct Cut {
  int64_t tile_rows, task_spans;  // at most
  int64_t part_rows, room;        // of the highest tile; floats for the partial results of one

  // Of a tile of a sequence, at most: of windows, those that `tokens` neighbours reach together.
  int tile_spans(const AttentionArgs& a, const StepContext& c, int s) const {
    const int all = spans_to(last_position(c, s));
    if (!a.window) return all;
    const int64_t tokens = (tile_rows + a.heads / a.kv_heads - 1) / (a.heads / a.kv_heads) + 1;
    const int64_t reached = (a.window + tokens) / kSpan + 2;
    return reached < all ? static_cast<int>(reached) : all;
  }

  // Tiles of one sequence over all KV heads, and parts of each.
  int64_t tiles(const AttentionArgs& a, const StepContext& c, int s) const {
    return (rows_of(a, c, s) + tile_rows - 1) / tile_rows * a.kv_heads;
  }
  int parts(const AttentionArgs& a, const StepContext& c, int s) const {
    return static_cast<int>((tile_spans(a, c, s) + task_spans - 1) / task_spans);
  }

  Part part(const AttentionTile& t, int64_t tile, int part, int parts) const {
    const int first = t.first / kSpan, last = spans_to(t.last), spans = last - first;
    if (parts == 1) return {first, last, first, last, nullptr, nullptr, 0};
    auto* counters = reinterpret_cast<int32_t*>(t.c->shared);
    float* partials = reinterpret_cast<float*>(t.c->shared) + kSharedCounters + tile * room;
    const int begin = first + spans * part / parts, end = first + spans * (part + 1) / parts;
    return {begin, end, first, last, counters + tile, partials, part_rows};
  }
};

// The knobs, or else the rule; spans stay together where their partial results would find no room.
inline Cut cut_of(const AttentionArgs& a, const StepContext& c) {
  const int64_t high = c.tactic->task_rows(), tasks = c.tactic->worker_tasks();
  Cut cut{.tile_rows = high && high < kAttentionRows ? high : kAttentionRows, .task_spans = 0, .part_rows = 0, .room = 0};
  int64_t tiles = 0, spans = 0, deepest = 0;
  for (int s = 0; s < c.sequences.count; ++s) {
    const int64_t own = cut.tile_spans(a, c, s), rows = rows_of(a, c, s);
    tiles += cut.tiles(a, c, s);
    spans += cut.tiles(a, c, s) * own;
    deepest = own > deepest ? own : deepest;
    cut.part_rows = rows > cut.part_rows ? rows : cut.part_rows;
  }
  if (cut.part_rows > cut.tile_rows) cut.part_rows = cut.tile_rows;
  cut.room = deepest * cut.part_rows * (c.caches[a.cache].layout.value_width() + 16);
  const int64_t all_tasks = c.n_workers * (tasks ? tasks : kWorkerTasks);
  cut.task_spans = (spans + all_tasks - 1) / all_tasks;
  const bool fits = tiles <= kSharedCounters && tiles * cut.room <= c.shared_bytes / 4 - kSharedCounters;
  if (c.n_workers == 1 || deepest < kSplitSpans || !fits) cut.task_spans = deepest;
  return cut;
}

}  // namespace millrace::MILLRACE_ISA
