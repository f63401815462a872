// The tile instructions of AMX in portable C++, as the Intel SDM (volume 2, chapter on AMX) specifies them. Each thread has
// its own tiles. Where the hardware raises a fault, the instruction has no effect and the fault is recorded: see `fault`.
#pragma once
#include <cstdint>

namespace millrace::emulated {

// In the order of the operands' signs: SS, SU, US, UU.
enum class Signs { both, first, second, none };

void load_configuration(const void* from);  // 64 bytes
void load_tile(int tile, const void* from, int64_t stride);
void store_tile(int tile, void* to, int64_t stride);
void zero_tile(int tile);
void multiply_bf16(int sums, int a, int b);
void multiply_bytes(Signs signs, int sums, int a, int b);
void release_tiles();

// The first fault of any thread since the last call, which forgets it: "" or instruction, fault and reason. Writes `bytes`
// at most, a zero at the end.
void fault(char* message, int64_t bytes);

}  // namespace millrace::emulated
