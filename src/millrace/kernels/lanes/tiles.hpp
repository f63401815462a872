// The configuration of AMX's tiles. What includes this says which instructions `_tile_...` are: the hardware's (amx.hpp), or
// those that tests emulate.
#pragma once
#include <cstdint>

namespace millrace::MILLRACE_ISA {

// Tiles 0 to 3 are sums of 16 x 16, floats or integers, 4 and 5 the rows of x, 6 and 7 the weights. While this lives, the
// thread's tiles are set for so many rows in the upper and the lower half, of `depth` bytes each; nobody else may use
// them, as a function that is called must not. The intrinsics do not say that they read and write memory: `fence` stands
// where that matters.
class Tiles {
 public:
  Tiles(int upper, int lower, int64_t depth = 64) {
    alignas(64) Shapes shapes = {1, 0, {}, {}, {}};
    for (int t = 0; t < 8; ++t) {
      const bool weights = t >= 6, below = t == 2 || t == 3 || t == 5;
      shapes.row_bytes[t] = static_cast<uint16_t>(t == 4 || t == 5 ? depth : 64);
      shapes.rows[t] = static_cast<uint8_t>(weights ? depth / 4 : below ? lower : upper);
      if (shapes.rows[t] == 0) shapes.row_bytes[t] = 0;  // a tile without rows has no columns
    }
    fence();
    _tile_loadconfig(&shapes);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  static void fence() { asm volatile("" ::: "memory"); }

 private:
  struct Shapes {  // as ldtilecfg reads it
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
};

}  // namespace millrace::MILLRACE_ISA
