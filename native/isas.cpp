// The instruction sets of this build, and which of them the CPU can run.
#include <cstring>

#include "isa.hpp"
#include "platform.hpp"

namespace millrace {

const Isa* const* usable_isas() {
  static const Isa* usable[5] = {};
  if (!usable[0]) {
    int n = 0;
#if defined(__x86_64__)
    if (platform::has_amx()) usable[n++] = &isa_amx;
    if (platform::has_avx512()) usable[n++] = &isa_avx512;
    if (platform::has_avx2()) usable[n++] = &isa_avx2;
#endif
    usable[n] = &isa_scalar;
  }
  return usable;
}

const char* isa_lacking(const char* name) {
  if (std::strcmp(name, "amx") == 0) return "it needs AMX with BF16 and INT8, and an operating system that lets it be used";
  if (std::strcmp(name, "avx512") == 0) return "it needs AVX-512 F, BW, DQ, VL, VNNI and BF16";
  if (std::strcmp(name, "avx2") == 0) return "it needs AVX2, FMA and F16C";
  return "this build knows amx, avx512, avx2 and scalar";
}

}  // namespace millrace
