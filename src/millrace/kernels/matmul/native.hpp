// matmul   y = epilogue(x @ w.T + bias) + residual
//   x (rows, k) in a row format, x_stride bytes apart | w packed panels of 32 outputs (pack.py) | y (rows, y_stride) float or, packed, bfloat16
//
// Numerics classes; each output is one chain, so its bits depend on neither the tile, the threads nor the other rows:
//   f32   blocks of 128: fma over k ascending from 0; blocks added in order
//   bf16  blocks of 128: pairs (odd product, then even product) from 0; blocks added in order
//         by tiles: see tiles.hpp
//   q8    per group: the integer dot product, exact; then y = fma(float(dot) * x_scale, w_scale, y), groups in order
//   a16   per group: integer weights as bfloat16, pairs as in bf16; then y = fma(dot, w_scale, y), groups in order
// gated: a panel holds 16 gates and their 16 ups; y = expression(gate, up) has half as many columns.
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
  int64_t k, group;
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

// Lines of 32 outputs, one float or one bfloat16 pair each, in blocks of 128 inputs.
template <int MR, class Op>
[[gnu::always_inline]] inline void tile_blocks(const TileInput& in, int64_t n_lines, int64_t block, float* total, Op op) {
  for (int64_t from = 0; from < n_lines; from += block) {
    const int64_t to = from + block < n_lines ? from + block : n_lines;
    F acc[MR][2];
    fill(acc, zero());
    for (int64_t k = from; k < to; ++k)
      each_row(acc, lines<2>([&](int v) { return in.load_ahead(in.w + k * 128 + v * 64); }), in.x + k * 4, in.x_stride, op);
    add_block(acc, from == 0, total);
  }
}

template <int MR>
void tile_f32(const TileInput& in, float* total) {
  tile_blocks<MR>(in, in.k, kBlock, total, [](F acc, I w, I x) { return fma(as_float(w), as_float(x), acc); });
}

template <int MR>
void tile_bf16(const TileInput& in, float* total) {
  tile_blocks<MR>(in, padded_k(in.k, 0) / 2, kBlock / 2, total, [](F acc, I w, I x) { return dot2(acc, w, x); });
}

// The groups of a quantised product: where group g of the weights and of a row begins.
struct Groups {
  int64_t count, padded, last;
  explicit Groups(int64_t k, int64_t group)
      : count(n_groups(k, group)), padded(up(group, 8)), last(up(k - (count - 1) * group, 8)) {}
  int64_t width(int64_t g) const { return g + 1 < count ? padded : last; }
};

// One group's integer dot products with kLines lines of a panel, added to acc. They are exact, so their order is free.
template <int MR>
[[gnu::always_inline]] inline void dot_bytes(const TileInput& in, const uint8_t* w, const uint8_t* x, int64_t width,
                                             I (&acc)[MR][kLines]) {
  for (int64_t k = 0; k < width; k += 4, w += 128)
    each_row(acc, lines<kLines>([&](int v) { return in.load_ahead(w + v * 64); }), x + k, in.x_stride,
             [](I a, I line, I four) { return dot4_byte(a, line, four); });
}

// The same with nibbles, in sums of up to kNibbleSums products; few rows take low and high nibbles in sums of their own,
// to hide the latency. Many have no registers for that; they read a line twice.
template <int MR>
[[gnu::always_inline]] inline void dot_nibbles(const TileInput& in, const uint8_t* w, const uint8_t* x, int64_t width,
                                               I (&acc)[MR][kLines]) {
  constexpr bool kApart = MR <= kRowsApart;
  const auto dot = [](I a, I line, I four) { return dot4_nibble(a, line, four); };
  const I nibble = splat_i(0x0f0f0f0f);
  for (int64_t from = 0; from < width; from += 4 * kNibbleSums) {
    const int64_t to = width - from < 4 * kNibbleSums ? width : from + 4 * kNibbleSums;
    I low[MR][kLines], high[kApart ? MR : 1][kLines];
    fill(low, splat_i(0));
    fill(high, splat_i(0));
    for (int64_t k = from; k < to; k += 8, w += 128) {
      if constexpr (kApart) {
        const auto both = lines<kLines>([&](int v) { return in.load_ahead(w + v * 64); });
        each_row(low, lines<kLines>([&](int v) { return both.line[v] & nibble; }), x + k, in.x_stride, dot);
        each_row(high, lines<kLines>([&](int v) { return shift_right(both.line[v], 4) & nibble; }), x + k + 4,
                 in.x_stride, dot);
      } else {
        each_row(low, lines<kLines>([&](int v) { return in.load_ahead(w + v * 64) & nibble; }), x + k, in.x_stride, dot);
        each_row(low, lines<kLines>([&](int v) { return shift_right(load_i(w + v * 64), 4) & nibble; }), x + k + 4,
                 in.x_stride, dot);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < kLines; ++v) {
        acc[r][v] = add_nibbles(acc[r][v], low[r][v]);
        if constexpr (kApart) acc[r][v] = add_nibbles(acc[r][v], high[r][v]);
      }
  }
}

template <int MR, bool W4>
void tile_q8(const TileInput& in, float* total) {
  constexpr int32_t kZero = W4 ? 8 : kByteZero;
  const Groups groups(in.k, in.group);
  const int64_t scales = up(padded_k(in.k, in.group), 4);
  const uint8_t* w = in.w;
  const uint8_t* x = in.x;
  for (int64_t g = 0; g < groups.count; ++g) {
    const int64_t width = groups.width(g), w_bytes = W4 ? width * 16 : width * 32;
    const uint8_t* row_scales = in.x + scales + g * 4;
    const uint8_t* row_sums = row_scales + groups.count * 4;
#pragma GCC unroll 2
    for (int from = 0; from < 2; from += kLines) {
      I acc[MR][kLines];  // starts at -zero_point * sum(x)
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < kLines; ++v)
          acc[r][v] = splat_i(-kZero * *reinterpret_cast<const int32_t*>(row_sums + r * in.x_stride));
      if constexpr (W4)
        dot_nibbles<MR>(in, w + from * 64, x, width, acc);
      else
        dot_bytes<MR>(in, w + from * 64, x, width, acc);
#pragma GCC unroll 2
      for (int v = 0; v < kLines; ++v) {
        const F w_scale = load_half(reinterpret_cast<const uint16_t*>(w + w_bytes + (from + v) * 32));
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
          const F x_scale = splat(*reinterpret_cast<const float*>(row_scales + r * in.x_stride));
          float* t = total + (r * 2 + from + v) * 16;
          store(t, fma(to_float(acc[r][v]) * x_scale, w_scale, g ? load(t) : zero()));
        }
      }
    }
    w += w_bytes + kLine;
    x += width;
  }
}

// Two codes of each lane, `shift` and `shift + 8` bits up, less the zero point, as a bfloat16 pair.
template <bool W4>
inline I code_pair(I line, int shift) {
  const I mask = splat_i(W4 ? 15 : 255), offset = splat_i(W4 ? 8 : 128);
  const I even = as_int(to_float((shift_right(line, shift) & mask) - offset));
  const I odd = as_int(to_float((shift_right(line, shift + 8) & mask) - offset));
  return shift_right(even, 16) + (odd & splat_i(static_cast<int32_t>(0xffff0000u)));
}

template <int MR, bool W4>
void tile_a16(const TileInput& in, float* total) {
  const Groups groups(in.k, in.group);
  const uint8_t* w = in.w;
  const uint8_t* x = in.x;
  constexpr int64_t kStep = W4 ? 8 : 4;  // inputs in a line
  for (int64_t g = 0; g < groups.count; ++g) {
    const int64_t width = groups.width(g);
    F acc[MR][2];
    fill(acc, zero());
    for (int64_t k = 0; k < width; k += kStep, w += 128) {
      const auto codes = lines<2>([&](int v) { return in.load_ahead(w + v * 64); });
#pragma GCC unroll 4
      for (int p = 0; p < kStep / 2; ++p) {  // W4: bytes hold elements k..k+3 low, k+4..k+7 high
        const int shift = p % 2 * 16 + p / 2 * 4;
        each_row(acc, lines<2>([&](int v) { return code_pair<W4>(codes.line[v], shift); }), x + k * 2 + p * 4, in.x_stride,
                 [](F a, I pairs, I pair) { return dot2(a, pairs, pair); });
      }
    }
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const F w_scale = load_half(reinterpret_cast<const uint16_t*>(w + v * 32));
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) {
        float* t = total + (r * 2 + v) * 16;
        store(t, fma(acc[r][v], w_scale, g ? load(t) : zero()));
      }
    }
    w += kLine;
    x += width * 2;
  }
}

}  // namespace millrace::MILLRACE_ISA
#include "tiles.hpp"
namespace millrace::MILLRACE_ISA {

enum class Class { f32, bf16, bf16_tiles, w8a8, w4a8, w8a16, w4a16 };

template <Class C, int MR>
void tile(const TileInput& in, float* total) {
  if constexpr (C == Class::f32) tile_f32<MR>(in, total);
  if constexpr (C == Class::bf16) tile_bf16<MR>(in, total);
#if !defined(__AMX_BF16__)
  if constexpr (C == Class::bf16_tiles) tile_bf16_tiles<MR>(in, total);
#endif
  if constexpr (C == Class::w8a8) tile_q8<MR, false>(in, total);
  if constexpr (C == Class::w4a8) tile_q8<MR, true>(in, total);
  if constexpr (C == Class::w8a16) tile_a16<MR, false>(in, total);
  if constexpr (C == Class::w4a16) tile_a16<MR, true>(in, total);
}

template <Class C, int MR>
void tile_rows(const MatmulArgs& a, TileInput in, int64_t panel_stride, int64_t row, int64_t panel, int64_t panels) {
  alignas(64) float total[MR * 2 * 16];
  in.x += row * in.x_stride;
  in.w += panel * panel_stride;
  for (const int64_t end = panel + panels; panel < end; ++panel, in.w += panel_stride) {
    tile<C, MR>(in, total);
    finish(a, total, row, MR, panel);
  }
}

template <Class C, int MR>
void tile_of(int rows, const MatmulArgs& a, const TileInput& in, int64_t panel_stride, int64_t row, int64_t panel,
             int64_t panels) {
  if (rows == MR) return tile_rows<C, MR>(a, in, panel_stride, row, panel, panels);
  if constexpr (MR > 1) tile_of<C, MR - 1>(rows, a, in, panel_stride, row, panel, panels);
}

// Rows of a tile at most, so that its sums stay in registers.
template <Class C>
constexpr int kRowsOf = C == Class::w4a8                        ? kNibbleRows
                        : C == Class::bf16_tiles                ? kTilesRows
                        : C == Class::w8a8                      ? kByteRows
                        : C == Class::w8a16 || C == Class::w4a16 ? kPairRows
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
template <Class C>
void multiply_panels(const MatmulArgs& a, const TileInput& in, int64_t panel_stride, int64_t rows, int64_t most,
                     int64_t panel, int64_t end) {
#if defined(__AMX_BF16__)
  if constexpr (C == Class::bf16_tiles) {
    for (int64_t row = 0; row < rows; row += most)
      rows_by_tiles(a, in, panel_stride, row, static_cast<int>(rows - row < most ? rows - row : most), panel, end);
    return;
  }
#endif
  const int64_t tiles = (rows + most - 1) / most, tile_height = (rows + tiles - 1) / tiles;
  for (int64_t row = 0; row < rows; row += tile_height) {
    const int64_t height = rows - row < tile_height ? rows - row : tile_height;
    tile_of<C, kRowsOf<C>>(static_cast<int>(height), a, in, panel_stride, row, panel, end - panel);
  }
}

template <Class C>
void multiply(const MatmulArgs& a, StepContext& c) {
  const int64_t rows = c.sizes[a.rows], panels = up(a.n, kPanel) / kPanel;
  if (rows == 0) return;
  const int64_t panel_stride = panel_bytes(a.weights, a.k, a.group);
  const TileInput in{a.x, a.w, a.x_stride, a.k, a.group, c.tactic->ahead() ? c.tactic->ahead() : kAhead};
  const int64_t asked = c.tactic->tile_rows(), most = asked && asked < kRowsOf<C> ? asked : kRowsOf<C>;
  for (Chunk p(c, panels, task_panels(c, panels, panel_stride)); p.next();)
    multiply_panels<C>(a, in, panel_stride, rows, most, p.begin, p.end);
}

inline void matmul(const MatmulArgs& a, StepContext& c) {
  if (a.weights == 0) return multiply<Class::f32>(a, c);
  if (a.weights == 1) return a.tiles ? multiply<Class::bf16_tiles>(a, c) : multiply<Class::bf16>(a, c);
  if (a.weights == 2) return a.format == 2 ? multiply<Class::w8a8>(a, c) : multiply<Class::w8a16>(a, c);
  return a.format == 2 ? multiply<Class::w4a8>(a, c) : multiply<Class::w4a16>(a, c);
}

}  // namespace millrace::MILLRACE_ISA
