#include "pool.hpp"

#include <stdexcept>
#include <string>
#include <utility>

#include "platform.hpp"

namespace millrace {

namespace {

// Long enough to bridge the gap between two kernels, short enough not to eat a core that others need. Between two steps
// the event loop and the interpreter want it more than a spinning worker does.
constexpr int kPhaseSpins = 2000;
constexpr int kJobSpins = 1000;
constexpr int kSuspicious = 200;  // spins after which a waiting worker looks whether somebody shares its CPU

constexpr uint64_t kMember = 1ull << 16, kArrived = 1, kOpen = 1ull << 31;

}  // namespace

Pool::State Pool::State::of(uint64_t word) {
  return {.turn = static_cast<uint32_t>(word >> 32), .open = (word & kOpen) != 0,
          .members = static_cast<int32_t>(word / kMember % 0x8000), .arrived = static_cast<int32_t>(word % kMember)};
}

uint64_t Pool::State::word() const {
  return uint64_t{turn} << 32 | (open ? kOpen : 0) | static_cast<uint64_t>(members) * kMember | static_cast<uint64_t>(arrived);
}

int32_t Pool::Bell::heard() const { return __atomic_load_n(&rung, __ATOMIC_SEQ_CST); }

void Pool::Bell::ring() {
  __atomic_add_fetch(&rung, 1, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&sleepers, __ATOMIC_SEQ_CST)) platform::wake_all(&rung);
}

Pool::Pool(int workers) : workers_(workers), cpus_suffice_(platform::usable_cpus() >= workers), cpu_of_(workers, -1) {
  try {
    for (int w = 1; w < workers_; ++w) threads_.emplace_back([this, w] { serve(w); });
  } catch (const std::exception& e) {  // a limit on processes or on memory; those that run must end before their Pool does
    stop();
    throw std::runtime_error("no more than " + std::to_string(threads_.size() + 1) + " of " + std::to_string(workers_) +
                             " threads can be started: " + e.what());
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  __atomic_store_n(&stopping_, true, __ATOMIC_SEQ_CST);
  become({.turn = state().turn + 1, .open = false, .members = 0, .arrived = 0});
  for (auto& t : threads_) t.join();
}

void Pool::become(const State& next) {
  __atomic_store_n(&state_, next.word(), __ATOMIC_SEQ_CST);
  bell_.ring();
}

void Pool::begin(Job job) {
  job_ = std::move(job);
  first_ = state().turn + 1;
  become({.turn = first_, .open = true, .members = 0, .arrived = 0});
}

void Pool::join() {
  const platform::FlushSubnormals flush;
  take_part(0);
}

void Pool::serve(int worker) {
  const platform::FlushSubnormals flush;
  for (;;) {
    const int32_t heard = bell_.heard();
    const State rest = take_part(worker);
    if (__atomic_load_n(&stopping_, __ATOMIC_SEQ_CST)) return;
    wait_while(rest.turn, heard, kJobSpins, worker);
  }
}

Pool::State Pool::take_part(int worker) {
  State mine = enter();
  while (mine.open) {
    job_.work(worker, static_cast<int>(mine.turn - first_));
    mine = leave(mine, worker);
  }
  return mine;
}

Pool::State Pool::enter() {
  for (uint64_t word = __atomic_load_n(&state_, __ATOMIC_SEQ_CST);;) {
    const State now = State::of(word);
    if (!now.open) return now;
    if (now.ends()) {  // whoever came last is about to open the next
      platform::pause();
      word = __atomic_load_n(&state_, __ATOMIC_SEQ_CST);
    } else if (__atomic_compare_exchange_n(&state_, &word, word + kMember, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
      return now;
    }
  }
}

Pool::State Pool::leave(State mine, int worker) {
  __atomic_store_n(&cpu_of_[worker], platform::current_cpu(), __ATOMIC_RELAXED);
  const int32_t heard = bell_.heard();
  State next{.turn = mine.turn + 1, .open = mine.turn + 1 - first_ != static_cast<uint32_t>(job_.phases),
             .members = 0, .arrived = 0};  // looked at before the job may be over
  const State now = State::of(__atomic_add_fetch(&state_, kArrived, __ATOMIC_SEQ_CST));
  if (!now.ends()) {
    wait_while(mine.turn, heard, kPhaseSpins, worker);
    return next;
  }
  if (job_.ended) job_.ended(static_cast<int>(mine.turn - first_));
  next.members = next.open ? now.members : 0;
  become(next);
  return next;
}

// heard: of the bell, before it was known that it is this turn.
void Pool::wait_while(uint32_t turn, int32_t heard, int spins, int worker) {
  const auto over = [&] {
    const int32_t now = bell_.heard();
    if (now == heard) return false;
    heard = now;
    return state().turn != turn;
  };
  for (int i = 0; i < spins; ++i) {
    if (over()) return;
    if (i == kSuspicious) leave_shared_cpu(worker);
    platform::pause();
  }
  __atomic_add_fetch(&bell_.sleepers, 1, __ATOMIC_SEQ_CST);
  while (!over()) platform::wait_while(&bell_.rung, heard);
  __atomic_sub_fetch(&bell_.sleepers, 1, __ATOMIC_SEQ_CST);
}

// Beside a busy neighbour the kernel may leave two workers on one CPU for long: each phase then costs a whole spin.
// Whoever waits moves on, once; nothing stays pinned.
void Pool::leave_shared_cpu(int worker) {
  if (!cpus_suffice_) return;
  const int here = platform::current_cpu();
  __atomic_store_n(&cpu_of_[worker], here, __ATOMIC_RELAXED);
  for (int w = 0; w < workers_; ++w)
    if (w != worker && __atomic_load_n(&cpu_of_[w], __ATOMIC_RELAXED) == here) {
      platform::move_from_cpu(here);
      __atomic_store_n(&cpu_of_[worker], platform::current_cpu(), __ATOMIC_RELAXED);
      return;
    }
}

}  // namespace millrace
