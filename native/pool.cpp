#include "pool.hpp"

#include <stdexcept>
#include <string>

#include "platform.hpp"

namespace millrace {

namespace {

// Long enough to bridge the gap between two kernels, short enough not to eat a core that others need. Between two steps
// the event loop and the interpreter want it more than a spinning worker does.
constexpr int kBarrierSpins = 2000;
constexpr int kJobSpins = 1000;
constexpr int kSuspicious = 200;  // spins after which a waiting worker looks whether somebody shares its CPU

}  // namespace

int32_t Pool::Counter::read() const { return __atomic_load_n(&value, __ATOMIC_ACQUIRE); }

void Pool::Counter::advance() {
  __atomic_add_fetch(&value, 1, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&sleepers, __ATOMIC_SEQ_CST)) platform::wake_all(&value);
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
  stopping_ = true;
  job_.advance();
  for (auto& t : threads_) t.join();
}

void Pool::wait(Counter& counter, int32_t old, int spins, int worker) {
  for (int i = 0; i < spins; ++i) {
    if (counter.read() != old) return;
    if (i == kSuspicious) leave_shared_cpu(worker);
    platform::pause();
  }
  __atomic_add_fetch(&counter.sleepers, 1, __ATOMIC_SEQ_CST);
  while (counter.read() == old) platform::wait_while(&counter.value, old);
  __atomic_sub_fetch(&counter.sleepers, 1, __ATOMIC_SEQ_CST);
}

// Beside a busy neighbour the kernel may leave two workers on one CPU for long: each barrier then costs a whole spin.
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

void Pool::serve(int worker) {
  const platform::FlushSubnormals flush;
  for (int32_t seen = 0;;) {
    wait(job_, seen, kJobSpins, worker);
    seen = job_.read();
    if (stopping_) return;
    (*work_)(worker);
    barrier(worker);
  }
}

void Pool::run(const std::function<void(int)>& work) {
  const platform::FlushSubnormals flush;
  work_ = &work;
  if (workers_ > 1) job_.advance();
  work(0);
  barrier(0);
}

void Pool::barrier(int worker) {
  if (workers_ == 1) return;
  __atomic_store_n(&cpu_of_[worker], platform::current_cpu(), __ATOMIC_RELAXED);
  const int32_t turn = turn_.read();
  if (__atomic_add_fetch(&arrived_, 1, __ATOMIC_ACQ_REL) == workers_) {
    __atomic_store_n(&arrived_, 0, __ATOMIC_RELAXED);
    turn_.advance();
  } else {
    wait(turn_, turn, kBarrierSpins, worker);
  }
}

}  // namespace millrace
