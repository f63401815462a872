// Single instructions for tests: emulated, and products of the hardware beside them.
#include "tiles.hpp"

#if defined(__AMX_BF16__)
#include <immintrin.h>
#endif

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace emulated = millrace::emulated;

EXPORTED void emulated_fault(char* message, int64_t bytes) { emulated::fault(message, bytes); }
EXPORTED void emulated_loadconfig(const void* from) { emulated::load_configuration(from); }
EXPORTED void emulated_loadd(int tile, const void* from, int64_t stride) { emulated::load_tile(tile, from, stride); }
EXPORTED void emulated_stored(int tile, void* to, int64_t stride) { emulated::store_tile(tile, to, stride); }
EXPORTED void emulated_zero(int tile) { emulated::zero_tile(tile); }
EXPORTED void emulated_release() { emulated::release_tiles(); }

// kind: 0 TDPBF16PS | 1 TDPBSSD | 2 TDPBSUD | 3 TDPBUSD | 4 TDPBUUD
EXPORTED void emulated_product(int kind, int sums, int a, int b) {
  if (kind == 0) return emulated::multiply_bf16(sums, a, b);
  emulated::multiply_bytes(static_cast<emulated::Signs>(kind - 1), sums, a, b);
}

// Rows of 64 bytes: tmm0 += tmm1 times tmm2, and back to `sums`. 0: this build has no AMX. The CPU must have it.
EXPORTED int hardware_product([[maybe_unused]] int kind, [[maybe_unused]] const void* configuration,
                              [[maybe_unused]] void* sums, [[maybe_unused]] const void* a, [[maybe_unused]] const void* b) {
#if defined(__AMX_BF16__)
  asm volatile("" ::: "memory");
  _tile_loadconfig(configuration);
  _tile_loadd(0, sums, 64);
  _tile_loadd(1, a, 64);
  _tile_loadd(2, b, 64);
  if (kind == 0) _tile_dpbf16ps(0, 1, 2);
  if (kind == 1) _tile_dpbssd(0, 1, 2);
  if (kind == 2) _tile_dpbsud(0, 1, 2);
  if (kind == 3) _tile_dpbusd(0, 1, 2);
  if (kind == 4) _tile_dpbuud(0, 1, 2);
  _tile_stored(0, sums, 64);
  _tile_release();
  asm volatile("" ::: "memory");
  return 1;
#else
  return 0;
#endif
}
