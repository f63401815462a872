// matmul   y = epilogue(x @ w.T + bias) + residual
//   x (rows, k) in a row format, x_stride bytes apart | w packed panels of 32 outputs (pack.py) | y (rows, y_stride) float
//
// Numerics classes; each output is one chain, so its bits depend on neither the tile, the threads nor the other rows:
//   f32   blocks of 128: fma over k ascending from 0; blocks added in order
//   bf16  blocks of 128: pairs (odd product, then even product) from 0; blocks added in order
//   q8    per group: the integer dot product, exact; then y = fma(float(dot) * x_scale, w_scale, y), groups in order
//   a16   per group: integer weights as bfloat16, pairs as in bf16; then y = fma(dot, w_scale, y), groups in order
// gated: a panel holds 16 gates and their 16 ups; y = expression(gate, up) has half as many columns.
#pragma once
namespace millrace::MILLRACE_ISA {

constexpr int64_t kBlock = 128;  // K elements between two additions into the total

// What one tile of MR rows x NP panels reads, and the totals it writes: total[row][vector][16].
struct TileInput {
  const uint8_t* x;
  const uint8_t* w;
  int64_t x_stride, panel_stride;
  int64_t k, group;
};

template <int MR, int NP>
[[gnu::always_inline]] inline void add_block(const F (&acc)[MR][2 * NP], bool opening, float* total) {
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < 2 * NP; ++v) {
      float* t = total + (r * 2 * NP + v) * 16;
      store(t, opening ? acc[r][v] : load(t) + acc[r][v]);
    }
}

template <int MR, int NP>
void tile_f32(const TileInput& in, float* total) {
  for (int64_t from = 0; from < in.k; from += kBlock) {
    const int64_t to = from + kBlock < in.k ? from + kBlock : in.k;
    F acc[MR][2 * NP];
    for (auto& row : acc)
      for (F& a : row) a = zero();
    for (int64_t k = from; k < to; ++k) {
      F w[2 * NP];
#pragma GCC unroll 8
      for (int v = 0; v < 2 * NP; ++v)
        w[v] = load(reinterpret_cast<const float*>(in.w + v / 2 * in.panel_stride + k * 128 + v % 2 * 64));
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) {
        const F x = as_float(splat_bytes(in.x + r * in.x_stride + k * 4));
#pragma GCC unroll 8
        for (int v = 0; v < 2 * NP; ++v) acc[r][v] = fma(w[v], x, acc[r][v]);
      }
    }
    add_block<MR, NP>(acc, from == 0, total);
  }
}

template <int MR, int NP>
void tile_bf16(const TileInput& in, float* total) {
  const int64_t pairs = padded_k(in.k, 0) / 2;
  for (int64_t from = 0; from < pairs; from += kBlock / 2) {
    const int64_t to = from + kBlock / 2 < pairs ? from + kBlock / 2 : pairs;
    F acc[MR][2 * NP];
    for (auto& row : acc)
      for (F& a : row) a = zero();
    for (int64_t k = from; k < to; ++k) {
      I w[2 * NP];
#pragma GCC unroll 8
      for (int v = 0; v < 2 * NP; ++v) w[v] = load_i(in.w + v / 2 * in.panel_stride + k * 128 + v % 2 * 64);
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) {
        const I x = splat_bytes(in.x + r * in.x_stride + k * 4);
#pragma GCC unroll 8
        for (int v = 0; v < 2 * NP; ++v) acc[r][v] = dot2(acc[r][v], w[v], x);
      }
    }
    add_block<MR, NP>(acc, from == 0, total);
  }
}

// The groups of a quantised product: where group g of the weights and of a row begins.
struct Groups {
  int64_t count, padded, last;
  explicit Groups(int64_t k, int64_t group)
      : count(n_groups(k, group)), padded(up(group, 8)), last(up(k - (count - 1) * group, 8)) {}
  int64_t width(int64_t g) const { return g + 1 < count ? padded : last; }
};

// acc += w x for one line of weights a vector; the broadcast of x serves all of them.
template <int MR, int NV>
[[gnu::always_inline]] inline void dot_lines(const I (&w)[NV], const uint8_t* x, int64_t x_stride, I (&acc)[MR][NV]) {
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r) {
    const I four = splat_bytes(x + r * x_stride);
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) acc[r][v] = dot4(acc[r][v], w[v], four);
  }
}

// One group's integer dot products: acc starts at -zero_point * sum(x), then four products at a time. A line of nibbles
// is read twice, for its low and its high ones: keeping it would take the registers that 14 rows need.
template <int MR, int NP, bool W4>
[[gnu::always_inline]] inline void dot_group(const TileInput& in, const uint8_t* w, const uint8_t* x, int64_t width,
                                             I (&acc)[MR][2 * NP]) {
  const I nibble = splat_i(0x0f0f0f0f);
  const auto line = [&](int64_t at, int v) { return load_i(w + v / 2 * in.panel_stride + at + v % 2 * 64); };
  I lines[2 * NP];
  for (int64_t k = 0; k < width; k += W4 ? 8 : 4) {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * NP; ++v) lines[v] = W4 ? line(k * 16, v) & nibble : line(k * 32, v);
    dot_lines(lines, x + k, in.x_stride, acc);
    if (!W4) continue;
#pragma GCC unroll 8
    for (int v = 0; v < 2 * NP; ++v) lines[v] = shift_right(line(k * 16, v), 4) & nibble;
    dot_lines(lines, x + k + 4, in.x_stride, acc);
  }
}

template <int MR, int NP, bool W4>
void tile_q8(const TileInput& in, float* total) {
  const Groups groups(in.k, in.group);
  const int64_t scales = up(padded_k(in.k, in.group), 4);
  const uint8_t* w = in.w;
  const uint8_t* x = in.x;
  for (int64_t g = 0; g < groups.count; ++g) {
    const int64_t width = groups.width(g), w_bytes = W4 ? width * 16 : width * 32;
    const uint8_t* row_scales = in.x + scales + g * 4;
    const uint8_t* row_sums = row_scales + groups.count * 4;
    I acc[MR][2 * NP];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
      const I start = splat_i((W4 ? -8 : -128) * *reinterpret_cast<const int32_t*>(row_sums + r * in.x_stride));
#pragma GCC unroll 8
      for (int v = 0; v < 2 * NP; ++v) acc[r][v] = start;
    }
    dot_group<MR, NP, W4>(in, w, x, width, acc);
#pragma GCC unroll 8
    for (int v = 0; v < 2 * NP; ++v) {
      const F w_scale =
          load_half(reinterpret_cast<const uint16_t*>(w + v / 2 * in.panel_stride + w_bytes + v % 2 * 32));
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) {
        const F x_scale = splat(*reinterpret_cast<const float*>(row_scales + r * in.x_stride));
        float* t = total + (r * 2 * NP + v) * 16;
        store(t, fma(to_float(acc[r][v]) * x_scale, w_scale, g ? load(t) : zero()));
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

template <int MR, int NP, bool W4>
void tile_a16(const TileInput& in, float* total) {
  const Groups groups(in.k, in.group);
  const uint8_t* w = in.w;
  const uint8_t* x = in.x;
  for (int64_t g = 0; g < groups.count; ++g) {
    const int64_t width = groups.width(g), step = W4 ? 8 : 4, w_bytes = W4 ? width * 16 : width * 32;
    F acc[MR][2 * NP];
    for (auto& row : acc)
      for (F& a : row) a = zero();
    for (int64_t k = 0; k < width; k += step)
      for (int v = 0; v < 2 * NP; ++v) {
        const I line = load_i(w + v / 2 * in.panel_stride + k / step * 128 + v % 2 * 64);
        for (int p = 0; p < step / 2; ++p) {  // W4: bytes hold elements k..k+3 low, k+4..k+7 high
          const I pair = code_pair<W4>(line, p % 2 * 16 + p / 2 * 4);
          for (int r = 0; r < MR; ++r)
            acc[r][v] = dot2(acc[r][v], pair, splat_bytes(x + r * in.x_stride + k * 2 + p * 4));
        }
      }
    for (int v = 0; v < 2 * NP; ++v) {
      const F w_scale =
          load_half(reinterpret_cast<const uint16_t*>(w + v / 2 * in.panel_stride + w_bytes + v % 2 * 32));
      for (int r = 0; r < MR; ++r) {
        float* t = total + (r * 2 * NP + v) * 16;
        store(t, fma(acc[r][v], w_scale, g ? load(t) : zero()));
      }
    }
    w += w_bytes + kLine;
    x += width * 2;
  }
}

enum class Class { f32, bf16, w8a8, w4a8, w8a16, w4a16 };

template <Class C, int MR, int NP>
void tile(const TileInput& in, float* total) {
  if constexpr (C == Class::f32) tile_f32<MR, NP>(in, total);
  if constexpr (C == Class::bf16) tile_bf16<MR, NP>(in, total);
  if constexpr (C == Class::w8a8) tile_q8<MR, NP, false>(in, total);
  if constexpr (C == Class::w4a8) tile_q8<MR, NP, true>(in, total);
  if constexpr (C == Class::w8a16) tile_a16<MR, NP, false>(in, total);
  if constexpr (C == Class::w4a16) tile_a16<MR, NP, true>(in, total);
}

// Totals of a tile to y: bias, expression, residual; columns beyond the matrix are dropped.
inline void finish(const MatmulArgs& a, const float* total, int64_t row, int rows, int64_t panel, int vectors) {
  const int64_t columns = a.gated ? a.y_stride : a.n;
  for (int v = 0; v < vectors; v += a.gated ? 2 : 1) {
    const int64_t column = a.gated ? (panel * 2 + v) / 2 * 16 : (panel * 2 + v) * 16;
    const int width = columns - column < 16 ? static_cast<int>(columns - column) : 16;
    if (width <= 0) return;
    F registers[8][kStrip];
    const int64_t at = (panel * 2 + v) * 16;
    for (int side = 0; side <= a.gated; ++side) {
      const int valid = a.n - (at + 16 * side) < 16 ? static_cast<int>(a.n - (at + 16 * side)) : 16;
      const F bias = a.bias ? load(a.bias + at + 16 * side, valid) : zero();
      for (int r = 0; r < rows; ++r) {
        const F value = load(total + (static_cast<int64_t>(r) * vectors + v + side) * 16);
        registers[side][r] = a.bias ? value + bias : value;
      }
    }
    const int result = a.code[0] ? evaluate(a.code, a.imm, registers, rows) : 0;
    for (int r = 0; r < rows; ++r) {
      const int64_t to = (row + r) * a.y_stride + column;
      const F value = registers[result][r];
      store(a.y + to, a.residual ? value + load(a.residual + to, width) : value, width);
    }
  }
}

using TileFunction = void (*)(const TileInput&, float*);

template <Class C, int MR>
void tile_rows(const MatmulArgs& a, TileInput in, int64_t row, int64_t panel, int64_t panels) {
  constexpr int NP = MR * 2 * kMaxPanels <= 8 ? kMaxPanels : MR * 4 <= 8 && kMaxPanels >= 2 ? 2 : 1;
  alignas(64) float total[MR * 2 * NP * 16];
  in.x += row * in.x_stride;
  in.w += panel * in.panel_stride;
  const int64_t end = panel + panels;
  for (; panel + NP <= end; panel += NP, in.w += NP * in.panel_stride) {
    tile<C, MR, NP>(in, total);
    finish(a, total, row, MR, panel, 2 * NP);
  }
  if constexpr (NP > 1)
    for (; panel < end; ++panel, in.w += in.panel_stride) {
      tile<C, MR, 1>(in, total);
      finish(a, total, row, MR, panel, 2);
    }
}

template <Class C, int MR>
void tile_of(int rows, const MatmulArgs& a, const TileInput& in, int64_t row, int64_t panel, int64_t panels) {
  if (rows == MR) return tile_rows<C, MR>(a, in, row, panel, panels);
  if constexpr (MR > 1) tile_of<C, MR - 1>(rows, a, in, row, panel, panels);
}

// Tasks are runs of panels whose weights stay in the second-level cache while all rows pass over them.
template <Class C>
void multiply(const MatmulArgs& a, StepContext& c) {
  const int64_t rows = c.rows(a.rows), panels = up(a.n, kPanel) / kPanel;
  if (rows == 0) return;
  const TileInput in{a.x, a.w, a.x_stride, panel_bytes(a.weights, a.k, a.group), a.k, a.group};
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows, tile_height = (rows + tiles - 1) / tiles;
  const int64_t cached = 320 * 1024 / in.panel_stride, fair = panels / (4 * c.n_workers);
  const int64_t most = cached < fair ? cached : fair;
  const int64_t rounds = most > 1 ? (panels - 1) / (most * c.n_workers) + 1 : 1;  // the workers finish together
  const int64_t size = most > 1 ? (panels - 1) / (rounds * c.n_workers) + 1 : 1;
  for (Chunk p(c, panels, size); p.next();)
    for (int64_t row = 0; row < rows; row += tile_height) {
      const int64_t height = rows - row < tile_height ? rows - row : tile_height;
      tile_of<C, kTileRows>(static_cast<int>(height), a, in, row, p.begin, p.end - p.begin);
    }
}

inline void matmul(const MatmulArgs& a, StepContext& c) {
  if (a.weights == 0) return multiply<Class::f32>(a, c);
  if (a.weights == 1) return multiply<Class::bf16>(a, c);
  if (a.weights == 2) return a.format == 2 ? multiply<Class::w8a8>(a, c) : multiply<Class::w8a16>(a, c);
  return a.format == 2 ? multiply<Class::w4a8>(a, c) : multiply<Class::w4a16>(a, c);
}

}  // namespace millrace::MILLRACE_ISA
