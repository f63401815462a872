// What one instruction set offers: the program's kernels, the vector passes of sampling, the loops of the probe.
#pragma once
#include "kernels_generated.hpp"
#include "probe.hpp"
#include "step_context.hpp"

namespace millrace {

constexpr int64_t kSampleBlock = 1024;  // logits whose exponentials are summed together,
constexpr int64_t kLookBlock = 256;     // and of which the largest is remembered

// Range of logits for row_weigh: those below `base` have weight 0, those in [floor, ceiling) are listed.
// base <= floor <= ceiling.
struct Band {
  float base, floor, ceiling;
};

// Its results, one value per block; weights are 2^((x - m) * scale), m the largest logit.
struct Weights {
  float *most, *references;  // the largest logit of each kLookBlock; the reference logit of each kSampleBlock
  float *all, *above;        // the sums of all weights, and of those from the ceiling on
  int32_t* ids;              // the listed ids, ascending; room for 16 more
  int64_t found;
  float m;  // NaN if a logit is not finite
};

struct SamplePasses {
  float (*look)(const float* x, int64_t n, float* most);
  void (*weigh)(const float* x, int64_t n, float scale, const Band* band, Weights& out);
  void (*exp2)(const float* x, int64_t n, float m, float scale, float* p, float* sums);
  int64_t (*find)(const float* x, int64_t n, float value);
  int64_t (*collect)(const float* x, int64_t from, int64_t to, float floor, float ceiling, int32_t* out);
  int64_t (*count)(const float* x, int64_t n, float floor);
  int64_t (*mass)(const float* x, const float* p, int64_t n, float floor, double& mass);
  int64_t (*rank)(const float* x, int64_t n, float value);
};

struct Isa {
  const char* name;
  KernelTable kernels;
  SamplePasses sample;
  int64_t scratch_bytes;  // a worker's scratch for the kernels, whatever the step
  const ProbeLoops* probe;
};

#if defined(__x86_64__)
extern const Isa isa_amx;
extern const Isa isa_avx512;
extern const Isa isa_avx2;
#endif
extern const Isa isa_scalar;

// The instruction sets that this build has and this CPU can run, best first; the last is always `scalar`.
const Isa* const* usable_isas();
const char* isa_lacking(const char* name);  // null, or what is missing to run `name`

}  // namespace millrace
