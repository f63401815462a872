#include "probe.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>

#include "executor.hpp"
#include "isa.hpp"
#include "pool.hpp"

namespace millrace {

namespace {

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Repeats work(part, passes), a part for each thread, for about `round_s`, `rounds` times; gives `amount` x passes a
// second.
void measure(int threads, double round_s, int rounds, double amount, double* rates,
             const std::function<void(int, int64_t)>& work) {
  Pool pool(threads);
  const auto timed = [&](int64_t passes) {
    const double start = now_s();
    int next = 0;
    pool.run({.work = [&](int, int) {
      for (int part; (part = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < threads;) work(part, passes);
    }});
    return now_s() - start;
  };
  // The better of two: a thread that was not scheduled must not make the rounds short. The first also warms up.
  const auto better = [&](int64_t passes) { return std::min(timed(passes), timed(passes)); };
  int64_t passes = 1;
  double seconds = better(passes);
  while (seconds < round_s / 4 && passes < (int64_t{1} << 40)) {
    passes *= 2;
    seconds = better(passes);
  }
  passes = std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(passes) * round_s / seconds));
  for (int r = 0; r < rounds; ++r) rates[r] = amount * static_cast<double>(passes) * threads / timed(passes);
}

std::atomic<uint64_t> sink;  // so that no result is dead

}  // namespace

const ProbeLoops& probe_loops(const char* isa) {
  for (const Isa* const* usable = usable_isas(); *usable; ++usable)
    if (std::strcmp((*usable)->name, isa) == 0) return *(*usable)->probe;
  throw std::runtime_error(std::string(isa) + " cannot run here: " + isa_lacking(isa));
}

void probe_read(const ProbeLoops& loops, int threads, int64_t bytes_per_thread, double round_s, int rounds,
                double* rates) {
  if (threads < 1 || rounds < 1 || bytes_per_thread < 1024 || bytes_per_thread % 1024)
    throw std::runtime_error("a read probe takes threads, rounds and whole KiB");
  const Arena buffer(bytes_per_thread * threads, "the read probe");
  std::memset(buffer.data(), 1, static_cast<size_t>(buffer.bytes()));  // pages of its own, not the shared zero page
  measure(threads, round_s, rounds, static_cast<double>(bytes_per_thread), rates, [&](int worker, int64_t passes) {
    uint64_t sum = 0;
    for (int64_t p = 0; p < passes; ++p) sum += loops.read(buffer.data() + worker * bytes_per_thread, bytes_per_thread);
    sink.fetch_add(sum, std::memory_order_relaxed);
  });
}

void probe_rate(const ProbeLoops& loops, int threads, Precision precision, double round_s, int rounds, double* rates) {
  if (threads < 1 || rounds < 1) throw std::runtime_error("a rate probe takes threads and rounds");
  const auto [loop, operations] = loops.rates[static_cast<int32_t>(precision)];
  if (operations == 0) {
    for (int r = 0; r < rounds; ++r) rates[r] = 0;
    return;
  }
  constexpr int64_t kInner = 1000;
  measure(threads, round_s, rounds, static_cast<double>(operations * kInner), rates, [&](int, int64_t passes) {
    sink.fetch_add(static_cast<uint64_t>(loop(passes * kInner)), std::memory_order_relaxed);
  });
}

}  // namespace millrace
