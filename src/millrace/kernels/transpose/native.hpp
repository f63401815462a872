// transpose   extent d of y is extent order[d] of x, both dense, of elements of 1, 2, 4 or 8 bytes
//   Neighbours of y that are neighbours in x, too, are walked as one; a task is some thousands of elements of y.
#pragma once
#include "broadcast/elements.hpp"

namespace millrace::MILLRACE_ISA {

constexpr int kTransposeTask = 4096;

struct TransposeWalk {
  int rank = 0;
  int64_t extents[kRank], strides[kRank];  // of y, and where in x the next one lies, in elements
};

inline bool transpose_walk(const TransposeArgs& a, const int32_t* sizes, TransposeWalk& walk) {
  int64_t strides[kRank], total = 1;
  int seen = 0;
  for (int i = a.rank - 1; i >= 0; --i) {
    strides[i] = total;
    total *= sizes[a.extents[i]];
    if (total > INT32_MAX || a.order[i] < 0 || a.order[i] >= a.rank) return false;
    seen |= 1 << a.order[i];
  }
  if (total != sizes[a.elements] || seen != (1 << a.rank) - 1) return false;
  for (int i = 0; i < a.rank; ++i) {
    const int64_t extent = sizes[a.extents[a.order[i]]], stride = strides[a.order[i]];
    if (extent == 1) continue;
    if (walk.rank && walk.strides[walk.rank - 1] == extent * stride) {
      walk.extents[walk.rank - 1] *= extent;
      walk.strides[walk.rank - 1] = stride;
    } else {
      walk.extents[walk.rank] = extent;
      walk.strides[walk.rank++] = stride;
    }
  }
  if (walk.rank == 0) {
    walk.extents[0] = walk.strides[0] = 1;
    walk.rank = 1;
  }
  return true;
}

template <class V>
inline void transpose_elements(const TransposeArgs& a, StepContext& c, const TransposeWalk& walk) {
  const int last = walk.rank - 1;
  const int64_t run = walk.extents[last], step = walk.strides[last];
  const int64_t pieces = (run + kTransposeTask - 1) / kTransposeTask, tasks = c.sizes[a.elements] / run * pieces;
  for (Chunk chunk(c, tasks, run >= kTransposeTask ? 1 : kTransposeTask / run); chunk.next();)
    for (int64_t task = chunk.begin; task < chunk.end; ++task) {
      const int64_t row = task / pieces, from = task % pieces * kTransposeTask;
      const int64_t count = run - from < kTransposeTask ? run - from : kTransposeTask;
      int64_t at = from * step, rest = row;
      for (int i = last - 1; i >= 0; rest /= walk.extents[i--]) at += rest % walk.extents[i] * walk.strides[i];
      const int64_t to = row * run + from;
      if (step == 1)
        std::memcpy(a.y + to * static_cast<int64_t>(sizeof(V)), a.x + at * static_cast<int64_t>(sizeof(V)),
                    static_cast<size_t>(count) * sizeof(V));
      else
        for (int64_t i = 0; i < count; ++i) put(a.y, to + i, element<V>(a.x, at + i * step));
    }
}

inline void transpose(const TransposeArgs& a, StepContext& c) {
  TransposeWalk walk;
  if (!transpose_walk(a, c.sizes, walk)) return;
  switch (type_bytes(a.type)) {
    case 1: return transpose_elements<uint8_t>(a, c, walk);
    case 2: return transpose_elements<uint16_t>(a, c, walk);
    case 4: return transpose_elements<uint32_t>(a, c, walk);
    default: return transpose_elements<uint64_t>(a, c, walk);
  }
}

}  // namespace millrace::MILLRACE_ISA
