// channel_affine   y = x * scale[c] + shift[c], a fused multiply-add      x, y (images, c planes), dense
#pragma once
namespace millrace::MILLRACE_ISA {

inline void channel_affine(const ChannelAffineArgs& a, StepContext& context) {
  const int64_t plane = context.sizes[a.plane], planes = context.sizes[a.elements] / plane;
  for (Chunk task(context, planes, 8); task.next();)
    for (int64_t t = task.begin; t < task.end; ++t) {
      const F scale = splat(a.scale[t % a.c]), shift = splat(a.shift[t % a.c]);
      const float* x = a.x + t * plane;
      float* y = a.y + t * plane;
      each_vector(0, plane, [&](int64_t i, auto lanes) { lanes.store(y + i, fma(lanes.load(x + i), scale, shift)); });
    }
}

}  // namespace millrace::MILLRACE_ISA
