// What one instruction set offers: the program's kernels and the vector passes of sampling.
#pragma once
#include "kernels_generated.hpp"
#include "step_context.hpp"

namespace millrace {

constexpr int64_t kSampleBlock = 1024;  // logits whose exponentials are summed together

// What row_weigh looks for among p = exp((x - m) * scale); base <= floor <= ceiling.
struct Weighing {
  float m, scale, base, floor, ceiling;
};

struct SamplePasses {
  float (*max)(const float* x, int64_t n);
  void (*exp)(const float* x, int64_t n, float m, float scale, float* p, float* sums);
  int64_t (*weigh)(const float* x, int64_t n, const Weighing& w, float* all, float* above, int32_t* ids);
  int64_t (*find)(const float* x, int64_t n, float value);
  int64_t (*collect)(const float* x, int64_t n, float floor, float ceiling, int32_t* out);
  int64_t (*above)(const float* p, int64_t n, float floor, float* sums);
  int64_t (*rank)(const float* x, int64_t n, float value);
  void (*top)(const float* x, int64_t n, int k, int32_t* ids, float* values);
};

struct Isa {
  const char* name;
  KernelTable kernels;
  SamplePasses sample;
  int64_t scratch_floats;  // a worker's scratch for the kernels, beside what a step's rows ask for
};

#if defined(__x86_64__)
extern const Isa isa_avx512;
extern const Isa isa_avx2;
#endif
extern const Isa isa_scalar;

// The instruction sets that this build has and this CPU can run, best first; the last is always `scalar`.
const Isa* const* usable_isas();
const char* isa_lacking(const char* name);  // null, or what is missing to run `name`

}  // namespace millrace
