// Products of 8-bit activations by AMX's tdpbssd, where rows are many. Sums of integers are exact, so y has the bits that
// tile_q8 gives it. A panel is brought into the second cache as signed bytes; then rows pass over it, 64 at a time: the
// sums of a few groups leave their tiles for the first cache, are scaled there and added to the rows' totals. Both take
// turns, not more: while tiles are at work, a core runs half as many vectors (docs/log.md).
#pragma once
#include "codes.hpp"

namespace millrace::MILLRACE_ISA {

#if defined(MILLRACE_TILES)

constexpr int64_t kBlockRows = kTileBlockRows;  // two tiles of x against the two halves of a panel
constexpr int64_t kManyRows = 24;    // from which on it pays to bring panels
constexpr int64_t kTilesAsked = 16;  // tile_rows of a tactic from which on it means tiles
constexpr int64_t kPartBytes = 1400 << 10;  // of rows: where there is AMX, second-level caches have 2 MiB

// Whether a product is made so. What tiles read behind a row's codes, to multiply it by zeros, must be the row's own.
inline bool goes_by_tiles(const TileInput& in, int64_t rows, int64_t asked) {
  const int64_t before = n_groups(in.k, in.x_group) - 1;
  const GroupTiles cut(in.k, in.x_group);
  const int64_t read = before * cut.padded + cut.steps_of(up(in.k - before * in.x_group, 8)) * cut.depth;
  return in.k <= kTileInputs && read <= in.x_stride && (asked ? asked >= kTilesAsked : rows >= kManyRows);
}

// So many rows pass over all panels before the next ones do: they stay in a second-level cache.
inline int64_t part_rows(const TileInput& in, int64_t rows) {
  const int64_t cached = kPartBytes / in.x_stride / kTilePassRows * kTilePassRows, most = cached ? cached : kTilePassRows;
  const int64_t parts = (rows - 1) / most + 1;
  return up((rows - 1) / parts + 1, kTilePassRows);
}

// What a worker keeps in its scratch.
struct BroughtPanel {
  float* total;     // [kTilePassRows][32]
  int32_t* sums;    // [kTileBatch][kBlockRows][32]
  float* scales;    // [group][32]
  float* minimums;  // [group][32]
  uint8_t* codes;   // [group][steps * depth / 4][32][4], signed

  BroughtPanel(float* scratch, int64_t n_groups)
      : total(scratch), sums(reinterpret_cast<int32_t*>(total + kTilePassRows * kPanel)),
        scales(total + (kTilePassRows + kTileBatch * kBlockRows) * kPanel), minimums(scales + n_groups * kPanel),
        codes(reinterpret_cast<uint8_t*>(minimums + n_groups * kPanel)) {}
};

// What is stored for the code 0, and taken off here: of bytes, lanes may do it in their products instead (kByteZero).
template <bool W4, Scaling S>
constexpr int kStoredZero = W4 ? kZeroCode<W4, S> : 128;

template <bool W4, Scaling S>
void bring_group(const BroughtPanel& b, const TileInput& in, PanelGroups<W4, S>& w, const GroupTiles& cut, int64_t width,
                 int64_t group) {
  w.enter();
  uint8_t* to = b.codes + group * cut.code_bytes();
  const uint8_t* const end = to + cut.steps_of(width) * cut.depth * kPanel;
  if constexpr (W4) {
    const I nibble = splat_i(0x0f0f0f0f);
    for (int64_t k = 0; k < width; k += 8, to += 256)
      for (int v = 0; v < 2; ++v) {
        const I both = in.load_ahead(w.codes + k * 16 + v * 64);
        store_i(to + v * 64, less_bytes(both & nibble, kStoredZero<W4, S>));
        store_i(to + 128 + v * 64, less_bytes(shift_right(both, 4) & nibble, kStoredZero<W4, S>));
      }
  } else {
    for (int64_t at = 0; at < width * kPanel; at += kLine, to += kLine)
      store_i(to, less_bytes(in.load_ahead(w.codes + at), kStoredZero<W4, S>));
  }
  for (; to < end; to += kLine) store_i(to, splat_i(0));
  for (int v = 0; v < 2; ++v) {
    store(b.scales + group * kPanel + v * 16, w.scale(v));
    if constexpr (with_minimums<S>) store(b.minimums + group * kPanel + v * 16, w.minimum(v));
  }
  w.leave(width);
}

template <bool W4, Scaling S>
void bring_panel(const BroughtPanel& b, const TileInput& in, const Groups& groups, const GroupTiles& cut) {
  PanelGroups<W4, S> w(in);
  for (int64_t g = 0; g < groups.count; ++g) bring_group(b, in, w, cut, groups.width(g), g);
  Tiles::fence();
}

// One product of tiles: `depth` inputs of up to 32 rows against a panel. Where a group begins, the sums of the one before
// leave their tiles one by one, so that the others go on.
template <bool kLower, bool kBegins, bool kStores>
[[gnu::always_inline]] inline void multiply_bytes(const uint8_t* x, int64_t x_stride, const uint8_t* w, int32_t* before) {
  _tile_loadd(6, w, 128);
  _tile_loadd(4, x, x_stride);
  if (kStores) _tile_stored(0, before, 128);
  if (kBegins) _tile_zero(0);
  _tile_dpbssd(0, 4, 6);
  _tile_loadd(7, w + 64, 128);
  if (kStores) _tile_stored(1, before + 16, 128);
  if (kBegins) _tile_zero(1);
  _tile_dpbssd(1, 4, 7);
  if (!kLower) return;
  _tile_loadd(5, x + 16 * x_stride, x_stride);
  if (kStores) _tile_stored(2, before + 16 * kPanel, 128);
  if (kBegins) _tile_zero(2);
  _tile_dpbssd(2, 5, 6);
  if (kStores) _tile_stored(3, before + 16 * kPanel + 16, 128);
  if (kBegins) _tile_zero(3);
  _tile_dpbssd(3, 5, 7);
}

// Where y goes, fetched a few rows at a time beside the products: its rows lie so far apart that the hardware does not.
struct Results {
  const uint8_t* next;
  int64_t stride, width, rows;

  Results(const MatmulArgs& a, int64_t row, int64_t rows, int64_t panel)
      : stride(a.y_stride * (a.packed ? 2 : 4)), width(kPanel / (1 + a.gated) * (a.packed ? 2 : 4)), rows(rows) {
    next = reinterpret_cast<const uint8_t*>(a.y) + row * stride + panel * width;
  }
  void fetch(int64_t count) {
    for (; count > 0 && rows > 0; --count, --rows, next += stride) {
      __builtin_prefetch(next, 1);
      __builtin_prefetch(next + width - 1, 1);
    }
  }
};

// Rows that pass over a panel.
template <Scaling S>
struct TilePass {
  const TileInput& in;
  const BroughtPanel& b;
  const Groups groups;
  const GroupTiles cut;
  const int64_t batch;     // groups whose sums the first cache holds beside what makes them
  const int64_t x_scales;  // bytes from the begin of a row; sums follow

  TilePass(const TileInput& in, const BroughtPanel& b)
      : in(in), b(b), groups(in.k, in.x_group), cut(in.k, in.x_group),
        batch(cut.padded > 128  ? 1
              : cut.padded > 64 ? 2
                                : kTileBatch),
        x_scales(up(padded_k(in.k, in.x_group), 4)) {}

  // Up to kTilePassRows rows, in blocks of the height that tiles are set to.
  template <bool kLower>
  void run(const uint8_t* x, int64_t rows, Results y) const {
    const int64_t fetched = kBlockRows * batch / groups.count + 1;
    for (int64_t first = 0; first < groups.count; first += batch)
      for (int64_t block = 0; block < rows; block += kBlockRows) {
        y.fetch(fetched);
        const int64_t count = groups.count - first < batch ? groups.count - first : batch;
        sum_groups<kLower>(x + block * in.x_stride, first, count);
        int64_t r = block;
        const int64_t end = rows - block < kBlockRows ? rows : block + kBlockRows;
        for (; r + 8 <= end; r += 8) add_scaled<8>(x + r * in.x_stride, r, first, count);
        for (; r < end; ++r) add_scaled<1>(x + r * in.x_stride, r, first, count);
      }
  }

 private:
  // Integer sums of `count` groups from `first` on, of the rows that tiles are set to.
  template <bool kLower>
  void sum_groups(const uint8_t* x, int64_t first, int64_t count) const {
    const int64_t x_stride = in.x_stride, depth = cut.depth, code_bytes = cut.code_bytes();
    const int64_t last_steps = cut.steps_of(groups.width(first + count - 1));
    const uint8_t* w = b.codes + first * code_bytes;
    int32_t* sums = b.sums;
    x += first * groups.padded;
    for (int64_t g = 0; g < count; ++g, sums += kBlockRows * kPanel, x += groups.padded, w += code_bytes) {
      if (g == 0)
        multiply_bytes<kLower, true, false>(x, x_stride, w, nullptr);
      else
        multiply_bytes<kLower, true, true>(x, x_stride, w, sums - kBlockRows * kPanel);
      const int64_t steps = g + 1 < count ? cut.steps : last_steps;
      for (int64_t s = 1; s < steps; ++s)
        multiply_bytes<kLower, false, false>(x + s * depth, x_stride, w + s * depth * kPanel, nullptr);
    }
    sums -= kBlockRows * kPanel;
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
    if (kLower) _tile_stored(2, sums + 16 * kPanel, 128);
    if (kLower) _tile_stored(3, sums + 16 * kPanel + 16, 128);
    Tiles::fence();
  }

  // Adds what was summed of R rows, scaled, to their totals, which stay in registers.
  template <int R>
  [[gnu::always_inline]] void add_scaled(const uint8_t* x, int64_t row, int64_t first, int64_t count) const {
    float* total = b.total + row * kPanel;
    const int32_t* sums = b.sums + row % kBlockRows * kPanel;
    const float *scales = b.scales + first * kPanel, *minimums = b.minimums + first * kPanel;
    const int64_t x_stride = in.x_stride, to_sums = groups.count * 4;
    x += x_scales + first * 4;
    F acc[R][2];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) acc[r][v] = first ? load(total + r * kPanel + v * 16) : zero();
    for (int64_t g = 0; g < count; ++g, x += 4, sums += kBlockRows * kPanel, scales += kPanel, minimums += kPanel)
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const F x_scale = as_float(splat_bytes(x + r * x_stride));
        F x_sum;
        if constexpr (with_minimums<S>) x_sum = to_float(splat_bytes(x + to_sums + r * x_stride)) * x_scale;
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          acc[r][v] = fma(to_float(load_i(sums + r * kPanel + v * 16)) * x_scale, load(scales + v * 16), acc[r][v]);
          if constexpr (with_minimums<S>) acc[r][v] = fma(x_sum, load(minimums + v * 16), acc[r][v]);
        }
      }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) store(total + r * kPanel + v * 16, acc[r][v]);
  }
};

// Rows [first, rows) against panels [panel, end).
template <bool W4, Scaling S>
void rows_by_byte_tiles(const MatmulArgs& a, TileInput in, int64_t panel_stride, int64_t first, int64_t rows, int64_t panel,
                        int64_t end, float* scratch) {
  const BroughtPanel b(scratch, n_groups(in.k, in.x_group));
  const TilePass<S> pass(in, b);
  in.w += panel * panel_stride;
  for (; panel < end; ++panel, in.w += panel_stride) {
    bring_panel<W4, S>(b, in, pass.groups, pass.cut);
    int64_t row = first;
    const auto run = [&]<bool kLower>(int64_t height) {
      pass.template run<kLower>(in.x + row * in.x_stride, height, Results(a, row, height, panel));
      for (int64_t r = 0; r < height; r += 16)
        finish(a, b.total + r * kPanel, row + r, static_cast<int>(height - r < 16 ? height - r : 16), panel);
      row += height;
    };
    if (rows - row >= kBlockRows) {
      const Tiles tiles(16, 16, pass.cut.depth);
      while (rows - row >= kTilePassRows) run.template operator()<true>(kTilePassRows);
      if (rows - row >= kBlockRows) run.template operator()<true>(kBlockRows);
    }
    if (row == rows) continue;
    const int rest = static_cast<int>(rows - row), upper = rest < 16 ? rest : 16;
    const Tiles tiles(upper, rest - upper, pass.cut.depth);
    rest > upper ? run.template operator()<true>(rest) : run.template operator()<false>(rest);
  }
}

#endif

}  // namespace millrace::MILLRACE_ISA
