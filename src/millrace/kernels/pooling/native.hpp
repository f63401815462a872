// pooling   y[oy][ox] = of x in a window of the same plane, the largest (kind 0), the sum over the window's size (1), or over
//   what of it lies in the plane (2); what lies outside counts as smaller than all, or as 0
//   x (planes of h * w) | y (planes of oh * ow), dense. Sums go over rows, then columns, ascending
#pragma once
namespace millrace::MILLRACE_ISA {

inline float pooled(const PoolingArgs& a, int64_t h, int64_t w, const float* plane, int64_t top, int64_t left) {
  float most = -__builtin_inff(), sum = 0;
  int inside = 0;
  for (int ky = 0; ky < a.kh; ++ky) {
    const int64_t iy = top + int64_t{ky} * a.dilation_y;
    if (iy < 0 || iy >= h) continue;
    for (int kx = 0; kx < a.kw; ++kx) {
      const int64_t ix = left + int64_t{kx} * a.dilation_x;
      if (ix < 0 || ix >= w) continue;
      const float value = plane[iy * w + ix];
      most = value > most || value != value ? value : most;  // NaN stays
      sum += value;
      ++inside;
    }
  }
  return a.kind == 0 ? most : sum / static_cast<float>(a.kind == 1 ? a.kh * a.kw : inside);
}

inline void pooling(const PoolingArgs& a, StepContext& context) {
  const int32_t* sizes = context.sizes;
  const int32_t of_x[] = {sizes[a.planes], sizes[a.h], sizes[a.w]}, of_y[] = {sizes[a.planes], sizes[a.oh], sizes[a.ow]};
  if (!product_is(sizes[a.x_elements], of_x, 3) || !product_is(sizes[a.y_elements], of_y, 3)) return;
  const int64_t h = sizes[a.h], w = sizes[a.w], oh = sizes[a.oh], ow = sizes[a.ow];
  for (Chunk task(context, sizes[a.planes], 4); task.next();)
    for (int64_t t = task.begin; t < task.end; ++t) {
      const float* plane = a.x + t * h * w;
      float* y = a.y + t * oh * ow;
      for (int64_t oy = 0; oy < oh; ++oy)
        for (int64_t ox = 0; ox < ow; ++ox) *y++ = pooled(a, h, w, plane, oy * a.stride_y - a.pad_y, ox * a.stride_x - a.pad_x);
    }
}

}  // namespace millrace::MILLRACE_ISA
