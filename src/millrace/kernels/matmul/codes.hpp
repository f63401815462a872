// Products of integer weights: tiles of the classes q8 and a16, whose order of sums native.hpp's head gives.
#pragma once
#include "finish.hpp"

namespace millrace::MILLRACE_ISA {

// What makes weights of codes, by its number in a program (declare.py).
enum class Scaling { plain, minimums, levels, levels_minimums };
template <Scaling S>
constexpr bool with_minimums = S == Scaling::minimums || S == Scaling::levels_minimums;
template <Scaling S>
constexpr bool in_levels = S == Scaling::levels || S == Scaling::levels_minimums;

// The groups of a quantised product: where group g of a row begins.
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

// Where a panel's codes and scales lie, group after group of x; one or more of these make a group of weights (pack.py).
template <bool W4, Scaling S>
struct PanelGroups {
  const uint8_t* codes;
  const uint8_t* scales = nullptr;    // of all 32 outputs: float16, or in two levels int8
  const uint8_t* minimums = nullptr;  // alike
  const uint8_t* upper = nullptr;     // the float16 scales of the super-block
  int64_t ahead, levels, level = 0;   // bytes; groups of a super-block; which of them this is
  int64_t group, parts, part = 0;     // inputs, with padding; groups of x in one of weights; which of them this is
  int64_t left;                       // inputs that are still to come, with padding

  PanelGroups(const TileInput& in)
      : codes(in.w), ahead(in.ahead), levels(in_levels<S> ? kSuperBlock / in.group : 0), level(levels),
        group(up(in.group, 8)), parts(in.group / in.x_group), left(padded_k(in.k, in.group)) {}

  // To the next group; codes lie after the scales of their super-block, and before those of their own.
  void enter() {
    if (part) return;
    if constexpr (in_levels<S>) {
      const int64_t bytes = kLine + levels * kPanel;
      if (level == levels) {
        upper = codes;
        codes += bytes * (1 + with_minimums<S>);
        for (const uint8_t* at = upper; at < codes; at += kLine) __builtin_prefetch(at + ahead);
        level = 0;
      }
      scales = upper + kLine + level * kPanel;
      minimums = scales + bytes;
    } else {
      scales = codes + (left < group ? left : group) * (W4 ? 16 : 32);
      minimums = scales + kLine;
      if constexpr (with_minimums<S>) {
        __builtin_prefetch(scales + ahead);
        __builtin_prefetch(minimums + ahead);
      }
    }
  }
  // Behind a group of x, of so many inputs.
  void leave(int64_t width) {
    codes += width * (W4 ? 16 : 32);
    left -= width;
    if (++part < parts && left) return;
    part = 0;
    if constexpr (in_levels<S>)
      ++level;
    else
      codes += kLine * (1 + with_minimums<S>);
  }

  // Of sixteen outputs, half v of the panel. A level is exact in float32: 11 bits times 8.
  F scale(int v) const { return at_level(scales, upper, v); }
  F minimum(int v) const { return at_level(minimums, upper + kLine + levels * kPanel, v); }

 private:
  static F at_level(const uint8_t* at, const uint8_t* above, int v) {
    if constexpr (in_levels<S>)
      return load_half(reinterpret_cast<const uint16_t*>(above + v * 32)) *
             to_float(load_i8(reinterpret_cast<const int8_t*>(at + v * 16)));
    else
      return load_half(reinterpret_cast<const uint16_t*>(at + v * 32));
  }
};

// What is stored for the code 0.
template <bool W4, Scaling S>
constexpr int32_t kZeroCode = !W4 ? kByteZero : with_minimums<S> ? 0 : 8;

template <int MR, bool W4, Scaling S>
void tile_q8(const TileInput& in, float* total) {
  constexpr int32_t kZero = kZeroCode<W4, S>;
  const Groups groups(in.k, in.x_group);
  const int64_t scales = up(padded_k(in.k, in.x_group), 4);
  PanelGroups<W4, S> w(in);
  const uint8_t* x = in.x;
  for (int64_t g = 0; g < groups.count; ++g) {
    const int64_t width = groups.width(g);
    w.enter();
    const uint8_t* row_scales = in.x + scales + g * 4;
    const uint8_t* row_sums = row_scales + groups.count * 4;
    float x_sum[MR];
    if constexpr (with_minimums<S>)
      for (int r = 0; r < MR; ++r)
        x_sum[r] = static_cast<float>(*reinterpret_cast<const int32_t*>(row_sums + r * in.x_stride)) *
                   *reinterpret_cast<const float*>(row_scales + r * in.x_stride);
#pragma GCC unroll 2
    for (int from = 0; from < 2; from += kLines) {
      I acc[MR][kLines];  // starts at -zero_point * sum(x)
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < kLines; ++v)
          acc[r][v] = splat_i(-kZero * *reinterpret_cast<const int32_t*>(row_sums + r * in.x_stride));
      if constexpr (W4)
        dot_nibbles<MR>(in, w.codes + from * 64, x, width, acc);
      else
        dot_bytes<MR>(in, w.codes + from * 64, x, width, acc);
#pragma GCC unroll 2
      for (int v = 0; v < kLines; ++v) {
        const F w_scale = w.scale(from + v);
        F w_minimum;
        if constexpr (with_minimums<S>) w_minimum = w.minimum(from + v);
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
          const F x_scale = splat(*reinterpret_cast<const float*>(row_scales + r * in.x_stride));
          float* t = total + (r * 2 + from + v) * 16;
          F y = fma(to_float(acc[r][v]) * x_scale, w_scale, g ? load(t) : zero());
          if constexpr (with_minimums<S>) y = fma(splat(x_sum[r]), w_minimum, y);
          store(t, y);
        }
      }
    }
    w.leave(width);
    x += width;
  }
}

// Two codes of each lane, `shift` and `shift + 8` bits up, less the zero point, as a bfloat16 pair.
template <bool W4, Scaling S>
inline I code_pair(I line, int shift) {
  const I mask = splat_i(W4 ? 15 : 255), offset = splat_i(!W4 ? 128 : with_minimums<S> ? 0 : 8);
  const I even = as_int(to_float((shift_right(line, shift) & mask) - offset));
  const I odd = as_int(to_float((shift_right(line, shift + 8) & mask) - offset));
  return shift_right(even, 16) + (odd & splat_i(static_cast<int32_t>(0xffff0000u)));
}

// The sum of `width` inputs in bfloat16: 16 lanes of pairs, then their tree.
inline float sum_pairs(const uint8_t* x, int64_t width) {
  const I ones = splat_i(0x3f803f80);
  F acc = zero();
  int64_t k = 0;
  for (; k + 32 <= width; k += 32) acc = dot2(acc, ones, load_i(x + k * 2));
  if (k < width) {
    alignas(64) uint8_t rest[64] = {};
    __builtin_memcpy(rest, x + k * 2, static_cast<size_t>(width - k) * 2);
    acc = dot2(acc, ones, load_i(rest));
  }
  return sum(acc);
}

template <int MR, bool W4, Scaling S>
void tile_a16(const TileInput& in, float* total) {
  const Groups groups(in.k, in.group);
  PanelGroups<W4, S> w(in);
  const uint8_t* x = in.x;
  constexpr int64_t kStep = W4 ? 8 : 4;  // inputs in a line
  for (int64_t g = 0; g < groups.count; ++g) {
    const int64_t width = groups.width(g);
    w.enter();
    const uint8_t* line = w.codes;
    F acc[MR][2];
    fill(acc, zero());
    for (int64_t k = 0; k < width; k += kStep, line += 128) {
      const auto codes = lines<2>([&](int v) { return in.load_ahead(line + v * 64); });
#pragma GCC unroll 4
      for (int p = 0; p < kStep / 2; ++p) {  // W4: bytes hold elements k..k+3 low, k+4..k+7 high
        const int shift = p % 2 * 16 + p / 2 * 4;
        each_row(acc, lines<2>([&](int v) { return code_pair<W4, S>(codes.line[v], shift); }), x + k * 2 + p * 4, in.x_stride,
                 [](F a, I pairs, I pair) { return dot2(a, pairs, pair); });
      }
    }
    float x_sum[MR];
    if constexpr (with_minimums<S>)
      for (int r = 0; r < MR; ++r) x_sum[r] = sum_pairs(x + r * in.x_stride, width);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const F w_scale = w.scale(v);
      F w_minimum;
      if constexpr (with_minimums<S>) w_minimum = w.minimum(v);
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) {
        float* t = total + (r * 2 + v) * 16;
        F y = fma(acc[r][v], w_scale, g ? load(t) : zero());
        if constexpr (with_minimums<S>) y = fma(splat(x_sum[r]), w_minimum, y);
        store(t, y);
      }
    }
    w.leave(width);
    x += width * 2;
  }
}

}  // namespace millrace::MILLRACE_ISA
