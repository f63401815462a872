// matmul   y = epilogue(x @ w.T + bias) + residual
//   x (rows, k) in a row format, x_stride bytes apart | w packed panels of 32 outputs (pack.py) | y (rows, y_stride) float or, packed, bfloat16
//
// Numerics classes; each output is one chain, so its bits depend on neither the tile, the threads nor the other rows:
//   f32   blocks of 128: fma over k ascending from 0; blocks added in order
//   bf16  blocks of 128: pairs (odd product, then even product) from 0; blocks added in order
//         by tiles: see tiles.hpp
//   q8    per group of x: the integer dot product, exact; then y = fma(float(dot) * x_scale, w_scale, y), groups in order;
//         with minimums, after each such step y = fma(float(sum of x's codes) * x_scale, w_minimum, y)
//         groups of x may be smaller than those of w, which they divide: these then share a w_scale
//   a16   per group: integer weights as bfloat16, pairs as in bf16; then y = fma(dot, w_scale, y), groups in order;
//         with minimums, after each such step y = fma(sum of x, w_minimum, y); that sum is of pairs as in bf16 with
//         weights of 1, pair i of each 32 inputs in lane i of 16, then their tree
//   fp8   E4M3 as bfloat16, which holds it exactly, summed as in bf16; then y = sum * the output's float scale
//   Scales and minimums in two levels are products that float32 holds exactly, so they add no rounding.
// gated: a panel holds 16 gates and their 16 ups; y = expression(gate, up) has half as many columns.
// experts: one such product for each, of the rows [starts[e], starts[e + 1]) with the e-th of the matrices and biases.
#pragma once
#include "finish.hpp"
namespace millrace::MILLRACE_ISA {

constexpr int64_t kBlock = 128;  // K elements between two additions into the total

// Weights are read once a step, in one stream: fetched this far ahead they come nearly at the memory's rate, without it at
// two thirds of that (docs/log.md). Tuning finds the distance of a machine.
constexpr int64_t kAhead = 8192;

// What one tile of MR rows x one panel reads, and the totals it writes: total[row][half of the panel][16].
struct TileInput {
  const uint8_t* x;
  const uint8_t* w;
  int64_t x_stride;
  int64_t k, group, x_group;
  int64_t ahead;  // bytes

  I load_ahead(const uint8_t* at) const {
    __builtin_prefetch(at + ahead);
    return load_i(at);
  }
};

template <int MR, int L, class V>
[[gnu::always_inline]] inline void fill(V (&acc)[MR][L], V value) {
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < L; ++v) acc[r][v] = value;
}

template <int MR>
[[gnu::always_inline]] inline void add_block(const F (&acc)[MR][2], bool opening, float* total) {
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      float* t = total + (r * 2 + v) * 16;
      store(t, opening ? acc[r][v] : load(t) + acc[r][v]);
    }
}

// Lines of weights, of sixteen outputs each, which a tile takes side by side.
template <int L>
struct Lines {
  I line[L];
};

template <int L, class Make>
[[gnu::always_inline]] inline Lines<L> lines(Make make) {
  Lines<L> made;
#pragma GCC unroll 4
  for (int v = 0; v < L; ++v) made.line[v] = make(v);
  return made;
}

// acc = op(acc, w, x): lines of weights against four bytes of each row; a row's broadcast serves all lines.
template <int MR, int L, class V, class Op>
[[gnu::always_inline]] inline void each_row(V (&acc)[MR][L], const Lines<L>& w, const uint8_t* x, int64_t x_stride, Op op) {
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r) {
    const I four = splat_bytes(x + r * x_stride);
#pragma GCC unroll 2
    for (int v = 0; v < L; ++v) acc[r][v] = op(acc[r][v], w.line[v], four);
  }
}

// Lines of 32 outputs, one float or one bfloat16 pair each, in blocks of 128 inputs: line(k, v) is a half of one.
template <int MR, class Line, class Op>
[[gnu::always_inline]] inline void tile_blocks(const TileInput& in, int64_t n_lines, int64_t block, float* total, Line line,
                                               Op op) {
  for (int64_t from = 0; from < n_lines; from += block) {
    const int64_t to = from + block < n_lines ? from + block : n_lines;
    F acc[MR][2];
    fill(acc, zero());
    for (int64_t k = from; k < to; ++k)
      each_row(acc, lines<2>([&](int v) { return line(k, v); }), in.x + k * 4, in.x_stride, op);
    add_block(acc, from == 0, total);
  }
}

template <int MR>
void tile_f32(const TileInput& in, float* total) {
  tile_blocks<MR>(
      in, in.k, kBlock, total, [&](int64_t k, int v) { return in.load_ahead(in.w + k * 128 + v * 64); },
      [](F acc, I w, I x) { return fma(as_float(w), as_float(x), acc); });
}

// Pairs of inputs.
template <int MR, class Line>
[[gnu::always_inline]] inline void tile_pairs(const TileInput& in, float* total, Line line) {
  tile_blocks<MR>(in, padded_k(in.k, 0) / 2, kBlock / 2, total, line, [](F acc, I w, I x) { return dot2(acc, w, x); });
}

template <int MR>
void tile_bf16(const TileInput& in, float* total) {
  tile_pairs<MR>(in, total, [&](int64_t k, int v) { return in.load_ahead(in.w + k * 128 + v * 64); });
}

}  // namespace millrace::MILLRACE_ISA
#include "byte_tiles.hpp"
#include "fp8.hpp"
#include "tiles.hpp"
namespace millrace::MILLRACE_ISA {

enum class Class { f32, bf16, bf16_tiles, w8a8, w4a8, w8a16, w4a16, fp8 };

template <Class C, Scaling S, int MR>
void tile(const TileInput& in, float* total) {
  if constexpr (C == Class::f32) tile_f32<MR>(in, total);
  if constexpr (C == Class::bf16) tile_bf16<MR>(in, total);
#if !defined(MILLRACE_TILES)
  if constexpr (C == Class::bf16_tiles) tile_bf16_tiles<MR>(in, total);
#endif
  if constexpr (C == Class::w8a8) tile_q8<MR, false, S>(in, total);
  if constexpr (C == Class::w4a8) tile_q8<MR, true, S>(in, total);
  if constexpr (C == Class::w8a16) tile_a16<MR, false, S>(in, total);
  if constexpr (C == Class::w4a16) tile_a16<MR, true, S>(in, total);
  if constexpr (C == Class::fp8) tile_fp8<MR>(in, total);
}

template <Class C, Scaling S, int MR>
void tile_rows(const MatmulArgs& a, TileInput in, int64_t panel_stride, int64_t row, int64_t panel, int64_t panels) {
  alignas(64) float total[MR * 2 * 16];
  in.x += row * in.x_stride;
  in.w += panel * panel_stride;
  for (const int64_t end = panel + panels; panel < end; ++panel, in.w += panel_stride) {
    tile<C, S, MR>(in, total);
    finish(a, total, row, MR, panel);
  }
}

template <Class C, Scaling S, int MR>
void tile_of(int rows, const MatmulArgs& a, const TileInput& in, int64_t panel_stride, int64_t row, int64_t panel,
             int64_t panels) {
  if (rows == MR) return tile_rows<C, S, MR>(a, in, panel_stride, row, panel, panels);
  if constexpr (MR > 1) tile_of<C, S, MR - 1>(rows, a, in, panel_stride, row, panel, panels);
}

// Rows of a tile at most, so that its sums stay in registers.
template <Class C>
constexpr int kRowsOf = C == Class::w4a8                        ? kNibbleRows
                        : C == Class::bf16_tiles                ? kTilesRows
                        : C == Class::w8a8                      ? kByteRows
                        : C == Class::w8a16 || C == Class::w4a16 || C == Class::fp8 ? kPairRows
                                                                                    : kTileRows;

// Panels of a task: what the tactic says, or else so many that their weights stay in a second-level cache while all rows
// pass over them, that there are several tasks a worker, and that the workers finish together.
inline int64_t task_panels(const StepContext& c, int64_t panels, int64_t panel_stride) {
  if (c.tactic->task_panels()) return c.tactic->task_panels();
  const int64_t cached = 320 * 1024 / panel_stride, fair = panels / (4 * c.n_workers);
  const int64_t most = cached < fair ? cached : fair;
  if (most <= 1) return 1;
  const int64_t rounds = (panels - 1) / (most * c.n_workers) + 1;
  return (panels - 1) / (rounds * c.n_workers) + 1;
}

// What a task does: panels [panel, end) for all rows.
template <Class C, Scaling S>
void multiply_panels(const MatmulArgs& a, const TileInput& in, int64_t panel_stride, int64_t rows, int64_t most,
                     int64_t panel, int64_t end) {
#if defined(MILLRACE_TILES)
  if constexpr (C == Class::bf16_tiles) {
    for (int64_t row = 0; row < rows; row += most)
      rows_by_tiles(a, in, panel_stride, row, static_cast<int>(rows - row < most ? rows - row : most), panel, end);
    return;
  }
#endif
  const int64_t tiles = (rows + most - 1) / most, tile_height = (rows + tiles - 1) / tiles;
  for (int64_t row = 0; row < rows; row += tile_height) {
    const int64_t height = rows - row < tile_height ? rows - row : tile_height;
    tile_of<C, S, kRowsOf<C>>(static_cast<int>(height), a, in, panel_stride, row, panel, end - panel);
  }
}

// The same of E4M3, which more rows than a tile has meet as bfloat16.
inline void multiply_fp8(const MatmulArgs& a, const TileInput& in, int64_t panel_stride, int64_t rows, int64_t most,
                         int64_t panel, int64_t end) {
  if (rows <= most) return multiply_panels<Class::fp8, Scaling::plain>(a, in, panel_stride, rows, most, panel, end);
  for (; panel < end; ++panel)
    for (int64_t row = 0; row < rows; row += kBroughtRows)
      rows_by_blocks(a, in, in.w + panel * panel_stride, row, rows - row < kBroughtRows ? rows - row : kBroughtRows,
                     panel);
}

inline TileInput tile_input(const MatmulArgs& a, const StepContext& c) {
  return {a.x, a.w, a.x_stride, a.k, a.group, a.x_group, c.tactic->ahead() ? c.tactic->ahead() : kAhead};
}

template <Class C>
int64_t most_rows(const StepContext& c) {
  const int64_t asked = c.tactic->tile_rows();
  return asked && asked < kRowsOf<C> ? asked : kRowsOf<C>;
}

// Whether rows of codes go by AMX's tiles.
template <Class C>
bool by_byte_tiles([[maybe_unused]] const TileInput& in, [[maybe_unused]] int64_t rows, [[maybe_unused]] const StepContext& c) {
#if defined(MILLRACE_TILES)
  if constexpr (C == Class::w8a8 || C == Class::w4a8) return goes_by_tiles(in, rows, c.tactic->tile_rows());
#endif
  return false;
}

template <Class C, Scaling S>
void multiply_any(const MatmulArgs& a, const TileInput& in, int64_t panel_stride, int64_t rows, const StepContext& c,
                  int64_t panel, int64_t end) {
  if constexpr (C == Class::fp8)
    multiply_fp8(a, in, panel_stride, rows, most_rows<C>(c), panel, end);
  else
    multiply_panels<C, S>(a, in, panel_stride, rows, most_rows<C>(c), panel, end);
}

// The product of one expert: its matrix, and its rows from `begin` on.
inline MatmulArgs of_expert(const MatmulArgs& a, int64_t expert, int64_t begin, int64_t matrix) {
  MatmulArgs own = a;
  own.x = a.x + begin * a.x_stride;
  own.w = a.w + expert * matrix;
  own.bias = a.bias ? a.bias + expert * a.n : nullptr;
  own.y = reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(a.y) + begin * a.y_stride * (a.packed ? 2 : 4));
  return own;
}

// Rows are sorted by experts; a task is panels of one expert for all of its rows.
template <Class C, Scaling S>
void multiply_by_experts(const MatmulArgs& a, StepContext& c) {
  const int64_t rows = c.sizes[a.rows], panels = up(a.n, kPanel) / kPanel;
  const int64_t panel_stride = panel_bytes(a.weights, a.k, a.group, a.scaling);
  const auto start = [&](int64_t e) { return a.starts[e] < 0 ? 0 : a.starts[e] < rows ? a.starts[e] : rows; };
  int64_t busy = 0;
  for (int64_t e = 0; e < a.experts; ++e) busy += start(e) < start(e + 1);
  if (!busy) return;
  const int64_t fitting = task_panels(c, panels * busy, panel_stride), size = fitting < panels ? fitting : panels;
  const int64_t tasks = (panels - 1) / size + 1;
  for (Chunk p(c, a.experts * tasks, 1); p.next();) {
    const int64_t expert = p.begin / tasks, panel = p.begin % tasks * size, begin = start(expert);
    const int64_t count = start(expert + 1) - begin, end = panel + size < panels ? panel + size : panels;
    if (count <= 0) continue;
    const MatmulArgs own = of_expert(a, expert, begin, panels * panel_stride);
    const TileInput in = tile_input(own, c);
#if defined(MILLRACE_TILES)
    if constexpr (C == Class::w8a8 || C == Class::w4a8)
      if (by_byte_tiles<C>(in, count, c)) {
        rows_by_byte_tiles<C == Class::w4a8, S>(own, in, panel_stride, 0, count, panel, end, c.scratch);
        continue;
      }
#endif
    multiply_any<C, S>(own, in, panel_stride, count, c, panel, end);
  }
}

template <Class C, Scaling S = Scaling::plain>
void multiply(const MatmulArgs& a, StepContext& c) {
  const int64_t rows = c.sizes[a.rows], panels = up(a.n, kPanel) / kPanel;
  if (rows == 0) return;
  if (a.experts && a.starts) return multiply_by_experts<C, S>(a, c);
  const int64_t panel_stride = panel_bytes(a.weights, a.k, a.group, a.scaling);
  const TileInput in = tile_input(a, c);
#if defined(MILLRACE_TILES)
  if constexpr (C == Class::w8a8 || C == Class::w4a8) {
    if (by_byte_tiles<C>(in, rows, c)) {
      const int64_t size = task_panels(c, panels, panel_stride), tasks = (panels - 1) / size + 1, part = part_rows(in, rows);
      for (Chunk p(c, (rows - 1) / part * tasks + tasks, 1); p.next();) {
        const int64_t row = p.begin / tasks * part, panel = p.begin % tasks * size;
        rows_by_byte_tiles<C == Class::w4a8, S>(a, in, panel_stride, row, row + part < rows ? row + part : rows, panel,
                                                panel + size < panels ? panel + size : panels, c.scratch);
      }
      return;
    }
  }
#endif
  for (Chunk p(c, panels, task_panels(c, panels, panel_stride)); p.next();)
    multiply_any<C, S>(a, in, panel_stride, rows, c, p.begin, p.end);
}

template <Class C>
void multiply_codes(const MatmulArgs& a, StepContext& c) {
  switch (static_cast<Scaling>(a.scaling)) {
    case Scaling::plain: return multiply<C>(a, c);
    case Scaling::minimums: return multiply<C, Scaling::minimums>(a, c);
    case Scaling::levels_minimums: return multiply<C, Scaling::levels_minimums>(a, c);
    case Scaling::levels:  // of bytes alone
      if constexpr (C == Class::w8a8 || C == Class::w8a16) return multiply<C, Scaling::levels>(a, c);
  }
}

inline void matmul(const MatmulArgs& a, StepContext& c) {
  if (a.weights == 0) return multiply<Class::f32>(a, c);
  if (a.weights == 1) return a.tiles ? multiply<Class::bf16_tiles>(a, c) : multiply<Class::bf16>(a, c);
  if (a.weights == 2) return a.format >= 2 ? multiply_codes<Class::w8a8>(a, c) : multiply_codes<Class::w8a16>(a, c);
  if (a.weights == 4) return multiply<Class::fp8>(a, c);
  return a.format >= 2 ? multiply_codes<Class::w4a8>(a, c) : multiply_codes<Class::w4a16>(a, c);
}

}  // namespace millrace::MILLRACE_ISA
