// Drawn jobs on a pool: each task is done once, after all of the phase before it, whoever comes late or never.
// pool WORKERS JOBS SEED; says nothing where all is well.
#include "pool.hpp"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

namespace {

[[noreturn]] void wrong(const char* what, int job, int phase) {
  std::fprintf(stderr, "job %d, phase %d: %s\n", job, phase, what);
  std::_Exit(1);
}

}  // namespace

int main(int, char** argv) {
  const int workers = std::atoi(argv[1]), jobs = std::atoi(argv[2]);
  std::mt19937 rng(static_cast<unsigned>(std::atoi(argv[3])));
  const auto draw = [&](int n) { return static_cast<int>(rng() % static_cast<unsigned>(n)); };
  millrace::Pool pool(workers);
  for (int job = 0; job < jobs; ++job) {
    const int phases = 1 + draw(6), tasks = draw(12), slow = draw(4);
    std::vector<int32_t> taken(phases, 0), done(phases, 0);  // `done` is no atomic: what ends a phase must order it
    std::vector<std::vector<int32_t>> by(phases, std::vector<int32_t>(static_cast<size_t>(tasks), 0));
    int n_ended = 0;
    const auto work = [&](int worker, int phase) {
      if (worker < 0 || worker >= workers) wrong("a worker that is not", job, phase);
      if (n_ended != phase) wrong("the phase before it has not ended", job, phase);
      if (slow == 1 && worker == 1) std::this_thread::sleep_for(std::chrono::microseconds(50));
      for (int t; (t = __atomic_fetch_add(&taken[phase], 1, __ATOMIC_RELAXED)) < tasks;) {
        for (int before = 0; phase && before < tasks; ++before)
          if (by[phase - 1][static_cast<size_t>(before)] != 1) wrong("a task before it was not done once", job, phase);
        ++by[phase][static_cast<size_t>(t)];
      }
    };
    const auto ended = [&](int phase) {
      if (n_ended++ != phase) wrong("phases end out of order", job, phase);
      ++done[phase];
    };
    pool.begin({.work = work, .phases = phases, .ended = ended});
    if (slow == 2) std::this_thread::sleep_for(std::chrono::microseconds(draw(200)));  // whoever is there does it all
    if (slow == 3) std::this_thread::yield();
    pool.join();
    for (int phase = 0; phase < phases; ++phase) {
      if (done[phase] != 1) wrong("it did not end once", job, phase);
      for (int t = 0; t < tasks; ++t)
        if (by[phase][static_cast<size_t>(t)] != 1) wrong("a task was not done once", job, phase);
    }
    if (slow == 0 && draw(3) == 0) std::this_thread::sleep_for(std::chrono::microseconds(draw(300)));  // they sleep
  }
}
