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
  void barrier();  // from inside run: waits for all workers; the last one to arrive wakes the others

 private:
  void serve(int worker);

  const int workers_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* work_ = nullptr;
  bool stopping_ = false;
  alignas(64) int32_t job_ = 0;       // counts runs; threads sleep on it between them
  alignas(64) int32_t arrived_ = 0;   // at the barrier
  alignas(64) int32_t turn_ = 0;      // counts barriers passed
};

}  // namespace millrace
