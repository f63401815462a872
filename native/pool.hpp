// A persistent team of threads that runs one function at a time, all of them together with the caller.
#pragma once
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace millrace {

class Pool {
 public:
  explicit Pool(int workers);  // the caller is worker 0; workers - 1 threads are started
  ~Pool();
  Pool(const Pool&) = delete;

  int workers() const { return workers_; }
  void run(const std::function<void(int worker)>& work);  // returns when all workers have returned
  void barrier(int worker);                               // from inside run: waits until all workers are here

 private:
  // A counter that threads wait on: a short spin, then sleep.
  struct alignas(64) Counter {
    int32_t value = 0;
    int32_t sleepers = 0;
    int32_t read() const;
    void advance();  // and wakes whoever sleeps
  };

  void serve(int worker);
  void stop();
  void wait(Counter& counter, int32_t old, int spins, int worker);
  void leave_shared_cpu(int worker);

  const int workers_;
  const bool cpus_suffice_;  // one for every worker
  std::vector<std::thread> threads_;
  const std::function<void(int)>* work_ = nullptr;
  bool stopping_ = false;
  Counter job_;   // counts runs
  Counter turn_;  // counts barriers passed
  alignas(64) int32_t arrived_ = 0;
  std::vector<int32_t> cpu_of_;  // where each worker was last seen
};

}  // namespace millrace
