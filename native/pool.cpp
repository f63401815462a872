#include "pool.hpp"

#include "platform.hpp"

namespace millrace {

namespace {

// Long enough to bridge the gap between two kernels, short enough not to eat a core that somebody else needs.
constexpr int kBarrierSpins = 4000;
constexpr int kJobSpins = 20000;

int32_t read(const int32_t& word) { return __atomic_load_n(&word, __ATOMIC_ACQUIRE); }

void wait_for_change(const int32_t& word, int32_t old, int spins) {
  for (int i = 0; i < spins; ++i) {
    if (read(word) != old) return;
    platform::pause();
  }
  while (read(word) == old) platform::wait_while(&word, old);
}

}  // namespace

Pool::Pool(int workers) : workers_(workers) {
  for (int w = 1; w < workers_; ++w) threads_.emplace_back([this, w] { serve(w); });
}

Pool::~Pool() {
  stopping_ = true;
  __atomic_add_fetch(&job_, 1, __ATOMIC_ACQ_REL);
  platform::wake_all(&job_);
  for (auto& t : threads_) t.join();
}

void Pool::serve(int worker) {
  const platform::FlushSubnormals flush;
  for (int32_t seen = 0;;) {
    wait_for_change(job_, seen, kJobSpins);
    seen = read(job_);
    if (stopping_) return;
    (*work_)(worker);
    barrier();
  }
}

void Pool::run(const std::function<void(int)>& work) {
  const platform::FlushSubnormals flush;
  if (workers_ > 1) {
    work_ = &work;
    __atomic_add_fetch(&job_, 1, __ATOMIC_ACQ_REL);
    platform::wake_all(&job_);
  }
  work(0);
  barrier();
}

void Pool::barrier() {
  if (workers_ == 1) return;
  const int32_t turn = read(turn_);
  if (__atomic_add_fetch(&arrived_, 1, __ATOMIC_ACQ_REL) == workers_) {
    __atomic_store_n(&arrived_, 0, __ATOMIC_RELAXED);
    __atomic_add_fetch(&turn_, 1, __ATOMIC_ACQ_REL);
    platform::wake_all(&turn_);
  } else {
    wait_for_change(turn_, turn, kBarrierSpins);
  }
}

}  // namespace millrace
