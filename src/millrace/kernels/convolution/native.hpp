// convolution   y[o][oy][ox] = bias[o] + sum over c, ky, kx of k[o][c][ky][kx] x[c][oy stride - pad + ky dilation][ox ...]
//   x (images, groups * c planes of h * w) | y (images, groups * n planes of oh * ow), dense; what lies outside a plane is 0
//   k (groups, n / 16 rounded up, c, kh, kw, 16): c and n are of one group, its outputs side by side in lanes, zeros behind them
// A plain kernel: sums go over c, ky and kx ascending, each a fused multiply-add, from the bias on. A task is a row of 16 planes.
#pragma once
namespace millrace::MILLRACE_ISA {

struct PlaneSizes {
  int64_t h, w, oh, ow;
};

// Of `Count` neighbouring outputs, from ox on; Inside: every tap of theirs lies within the row.
template <int Count, bool Inside>
inline void convolve(const ConvolutionArgs& a, const PlaneSizes& s, const float* planes, const float* k, F bias, int64_t oy,
                     int64_t ox, F (&acc)[Count]) {
  for (int j = 0; j < Count; ++j) acc[j] = bias;
  const int64_t left = ox * a.stride_x - a.pad_x;
  for (int c = 0; c < a.c; ++c) {
    const float* plane = planes + int64_t{c} * s.h * s.w;
    for (int ky = 0; ky < a.kh; ++ky) {
      const int64_t iy = oy * a.stride_y - a.pad_y + int64_t{ky} * a.dilation_y;
      if (iy < 0 || iy >= s.h) continue;
      const float* row = plane + iy * s.w;
      for (int kx = 0; kx < a.kw; ++kx) {
        const F taps = load(k + ((int64_t{c} * a.kh + ky) * a.kw + kx) * 16);
        for (int j = 0; j < Count; ++j) {
          const int64_t ix = left + int64_t{j} * a.stride_x + int64_t{kx} * a.dilation_x;
          if (Inside || (ix >= 0 && ix < s.w)) acc[j] = fma(splat(row[ix]), taps, acc[j]);
        }
      }
    }
  }
}

inline void convolution(const ConvolutionArgs& a, StepContext& context) {
  constexpr int kAtOnce = 4;
  const int32_t* sizes = context.sizes;
  const PlaneSizes s{sizes[a.h], sizes[a.w], sizes[a.oh], sizes[a.ow]};
  const int32_t of_x[] = {sizes[a.images], a.groups, a.c, sizes[a.h], sizes[a.w]};
  const int32_t of_y[] = {sizes[a.images], a.groups, a.n, sizes[a.oh], sizes[a.ow]};
  if (!product_is(sizes[a.x_elements], of_x, 5) || !product_is(sizes[a.y_elements], of_y, 5)) return;
  const int64_t blocks = (a.n + 15) / 16, tasks = sizes[a.images] * a.groups * blocks * s.oh;
  const int64_t span = int64_t{a.kw - 1} * a.dilation_x, block_floats = int64_t{a.c} * a.kh * a.kw * 16;
  for (Chunk task(context, tasks, 1); task.next();) {
    const int64_t oy = task.begin % s.oh;
    const int64_t block = task.begin / s.oh % blocks, group = task.begin / s.oh / blocks % a.groups;
    const int64_t row = task.begin / s.oh / blocks / a.groups;
    const float* planes = a.x + (row * a.groups + group) * a.c * s.h * s.w;
    const float* k = a.k + (group * blocks + block) * block_floats;
    const F bias = load(a.bias + (group * blocks + block) * 16);
    const int outputs = a.n - block * 16 < 16 ? static_cast<int>(a.n - block * 16) : 16;
    float* y = a.y + (row * a.groups * a.n + group * a.n + block * 16) * s.oh * s.ow + oy * s.ow;
    const auto give = [&](F sums, int64_t ox) {
      alignas(64) float lanes[16];
      store(lanes, sums);
      for (int o = 0; o < outputs; ++o) y[int64_t{o} * s.oh * s.ow + ox] = lanes[o];
    };
    int64_t ox = 0;
    while (ox < s.ow) {
      const int64_t first = ox * a.stride_x - a.pad_x, last = first + int64_t{kAtOnce - 1} * a.stride_x + span;
      if (ox + kAtOnce <= s.ow && first >= 0 && last < s.w) {
        F acc[kAtOnce];
        convolve<kAtOnce, true>(a, s, planes, k, bias, oy, ox, acc);
        for (int j = 0; j < kAtOnce; ++j) give(acc[j], ox + j);
        ox += kAtOnce;
      } else {
        F acc[1];
        convolve<1, false>(a, s, planes, k, bias, oy, ox, acc);
        give(acc[0], ox++);
      }
    }
  }
}

}  // namespace millrace::MILLRACE_ISA
