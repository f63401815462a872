// What this machine can do at most: reading from each level of its memory, and multiplying in each precision.
#pragma once
#include <cstdint>

namespace millrace {

enum class Precision : int32_t { kFp32 = 0, kBf16 = 1, kInt8 = 2, kTiles = 3 };  // kTiles: bfloat16 by AMX

// Multiplying from registers. operations (a multiply and an add are two) of one round; 0: there is no such instruction.
struct RateLoop {
  float (*run)(int64_t rounds);
  int64_t operations;
};

// The inner loops of one instruction set; like its kernels, compiled in a unit of its own (probe_unit.cpp).
struct ProbeLoops {
  const char* name;
  uint64_t (*read)(const uint8_t* data, int64_t bytes);  // touches every byte once; bytes is a multiple of 1024
  RateLoop rates[4];  // by Precision
};

const ProbeLoops& probe_loops(const char* isa);  // throws std::runtime_error for one that cannot run here

// One figure per round: bytes a second that `threads` threads together read, each again and again from its own
// `bytes_per_thread` on huge pages.
void probe_read(const ProbeLoops& loops, int threads, int64_t bytes_per_thread, double round_s, int rounds, double* rates);
// One figure per round: operations a second of `threads` threads together, from registers.
void probe_rate(const ProbeLoops& loops, int threads, Precision precision, double round_s, int rounds, double* rates);

}  // namespace millrace
