// What differs between operating systems and processors: huge pages, futex, affinity, floating-point modes, CPU features.
#pragma once
#include <cstdint>

namespace millrace::platform {

// Anonymous zeroed memory, aligned to 2 MiB, on huge pages where the system gives them; null when there is none.
void* allocate(int64_t bytes);
void release(void* memory, int64_t bytes);

void wait_while(const int32_t* word, int32_t value);  // sleeps while *word == value; may wake early
void wake_all(const int32_t* word);
void pause();  // a polite spin

// Subnormals read and written as zero in the calling thread, for as long as this lives: on every thread, so in every sum.
class FlushSubnormals {
 public:
  FlushSubnormals();
  ~FlushSubnormals();

 private:
  uint64_t before_;
};

bool has_avx2();    // AVX2, FMA, F16C, and the operating system saves the registers
bool has_avx512();  // AVX-512 F, BW, DQ, VL, VNNI, BF16, likewise
bool has_amx();     // and the tiles of AMX, which the operating system lets this process use
int usable_cpus();  // by affinity
int current_cpu();
void move_from_cpu(int cpu);  // the calling thread, now, to another usable CPU if there is one; its affinity stays

}  // namespace millrace::platform
