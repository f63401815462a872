// Where the bytes of a packed row and of a packed matrix lie: src/millrace/kernels/layout.py in C++ (a test compares).
#pragma once
#include <cstdint>

// Always inlined: a copy of its own, compiled with one unit's instruction set, could be linked into all the others.
#define MILLRACE_INLINE [[gnu::always_inline]] constexpr

namespace millrace {

constexpr int64_t kPanel = 32;  // outputs side by side in one weight panel: two 16-lane vectors
constexpr int64_t kLine = 64;   // bytes of a cache line
constexpr int64_t kSuperBlock = 256;  // inputs that share the upper one of two levels of scales

MILLRACE_INLINE int64_t up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }
// Of an element of a value: f32, i32, f16, i8, i64, bool.
MILLRACE_INLINE int64_t type_bytes(int64_t type) { return type == 4 ? 8 : type < 2 ? 4 : type == 2 ? 2 : 1; }
MILLRACE_INLINE int64_t n_groups(int64_t k, int64_t group) { return group == 0 ? 1 : (k + group - 1) / group; }

MILLRACE_INLINE int64_t padded_k(int64_t k, int64_t group) {
  if (group == 0) return up(k, 2);
  const int64_t whole = (k - 1) / group;
  return whole * up(group, 8) + up(k - whole * group, 8);
}

MILLRACE_INLINE int64_t row_bytes(int64_t format, int64_t k, int64_t group) {
  if (format == 0) return k * 4;
  const int64_t kp = padded_k(k, group);
  const int64_t raw = format == 1 ? kp * 2 : up(kp, 4) + 8 * n_groups(k, group);
  return (raw + kLine - 1) / kLine / 2 * 2 * kLine + kLine;
}

MILLRACE_INLINE int64_t super_block_bytes(int64_t group) { return kLine + kSuperBlock / group * kPanel; }

MILLRACE_INLINE int64_t scaling_bytes(int64_t k, int64_t group, int64_t scaling) {
  const int64_t kinds = 1 + scaling % 2;
  if (scaling < 2) return n_groups(k, group) * kLine * kinds;
  return up(k, kSuperBlock) / kSuperBlock * super_block_bytes(group) * kinds;
}

MILLRACE_INLINE int64_t panel_bytes(int64_t weights, int64_t k, int64_t group, int64_t scaling = 0) {
  const int64_t kp = padded_k(k, group);
  if (weights == 0) return k * kPanel * 4;
  if (weights == 1) return kp * kPanel * 2;
  if (weights == 4) return kp * kPanel + kPanel * 4;
  return (weights == 2 ? kp * kPanel : kp * kPanel / 2) + scaling_bytes(k, group, scaling);
}

MILLRACE_INLINE int64_t matrix_bytes(int64_t weights, int64_t n, int64_t k, int64_t group, int64_t scaling = 0) {
  return up(n, kPanel) / kPanel * panel_bytes(weights, k, group, scaling);
}

MILLRACE_INLINE int64_t byte_row_bytes(int64_t k, int64_t group) {
  return up(padded_k(k, group) + 2 * n_groups(k, group), kLine);
}

// How tiles of AMX take groups of 8-bit activations: `steps` products of up to 64 inputs each, `depth` at most.
struct GroupTiles {
  int64_t padded, depth, steps;
  [[gnu::always_inline]] constexpr GroupTiles(int64_t k, int64_t group)
      : padded(up(k < group ? k : group, 8)),
        depth(up((padded - 1) / ((padded + 63) / 64) + 1, 4)),
        steps(steps_of(padded)) {}
  MILLRACE_INLINE int64_t steps_of(int64_t width) const { return (width - 1) / depth + 1; }
  MILLRACE_INLINE int64_t code_bytes() const { return steps * depth * kPanel; }  // of a group of one panel
};

constexpr int64_t kTilePassRows = 64, kTileBlockRows = 32, kTileBatch = 4;  // rows, rows and groups at a time at most
constexpr int64_t kTileInputs = 1 << 16;  // whose codes a worker brings at most

// What a worker needs for such products: totals, sums, scales and minimums of 32 outputs, and a panel's codes.
MILLRACE_INLINE int64_t byte_tiles_floats(int64_t format, int64_t weights, int64_t k, int64_t group) {
  if (format < 2 || weights < 2 || k > kTileInputs) return 0;
  const int64_t groups = n_groups(k, group);
  return (kTilePassRows + kTileBatch * kTileBlockRows + 2 * groups) * kPanel + groups * GroupTiles(k, group).code_bytes() / 4;
}

}  // namespace millrace
