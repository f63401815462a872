#include "platform.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace millrace::platform {

constexpr int64_t kHugePage = 2 << 20;

void* allocate(int64_t bytes) {
  const int64_t room = bytes + kHugePage;
  void* raw = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  auto start = reinterpret_cast<uintptr_t>(raw);
  const uintptr_t aligned = (start + kHugePage - 1) / kHugePage * kHugePage;
  if (aligned > start) munmap(raw, aligned - start);
  const uintptr_t used_end = (aligned + bytes + 4095) / 4096 * 4096;
  if (start + room > used_end) munmap(reinterpret_cast<void*>(used_end), start + room - used_end);
  madvise(reinterpret_cast<void*>(aligned), bytes, MADV_HUGEPAGE);  // advice: without huge pages it is only slower
  return reinterpret_cast<void*>(aligned);
}

void release(void* memory, int64_t bytes) {
  if (memory) munmap(memory, (bytes + 4095) / 4096 * 4096);
}

void wait_while(const int32_t* word, int32_t value) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(const int32_t* word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }

int usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return CPU_COUNT(&set);
}

int current_cpu() { return sched_getcpu(); }

void move_from_cpu(int cpu) {
  cpu_set_t all;
  CPU_ZERO(&all);
  if (sched_getaffinity(0, sizeof all, &all) != 0 || CPU_COUNT(&all) < 2) return;
  cpu_set_t others = all;
  CPU_CLR(cpu, &others);
  if (sched_setaffinity(0, sizeof others, &others) == 0) sched_setaffinity(0, sizeof all, &all);
}

#if defined(__x86_64__)

void pause() { _mm_pause(); }

constexpr uint32_t kFlushToZero = 1u << 15, kSubnormalsAreZero = 1u << 6;
FlushSubnormals::FlushSubnormals() : before_(_mm_getcsr()) {
  _mm_setcsr(static_cast<uint32_t>(before_) | kFlushToZero | kSubnormalsAreZero);
}
FlushSubnormals::~FlushSubnormals() { _mm_setcsr(static_cast<uint32_t>(before_)); }

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}
bool has_amx() {  // GCC 12 does not tell
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;  // of leaf 7's EDX
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl(2): a process asks before it uses tiles
  unsigned a, b, c, d;
  if (!has_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  return (d & kBf16) && (d & kTile) && (d & kInt8) && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

#elif defined(__aarch64__)

void pause() { asm volatile("yield"); }

constexpr uint64_t kFlushToZero = 1ull << 24;
FlushSubnormals::FlushSubnormals() {
  asm volatile("mrs %0, fpcr" : "=r"(before_));
  asm volatile("msr fpcr, %0" ::"r"(before_ | kFlushToZero));
}
FlushSubnormals::~FlushSubnormals() { asm volatile("msr fpcr, %0" ::"r"(before_)); }

bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_amx() { return false; }

#else
#error "add this processor's pause, subnormal mode and features here"
#endif

}  // namespace millrace::platform
