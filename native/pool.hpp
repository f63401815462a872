// A team of threads that works through the phases of one job at a time, together with the caller once it joins them.
//
// Threads that the OS has not scheduled yet are not waited for; they join whichever phase is running when they wake. A
// phase ends when all threads that joined it are done.
#pragma once
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace millrace {

class Pool {
 public:
  struct Job {
    // A worker's part of a phase. Work is claimed dynamically, so a single worker may do all of it.
    std::function<void(int worker, int phase)> work;
    int phases = 1;  // at least 1
    std::function<void(int phase)> ended;  // called by one worker before the next phase begins; may be empty
  };

  explicit Pool(int workers);  // the caller is worker 0; workers - 1 threads are started
  ~Pool();                     // the job must have been joined
  Pool(const Pool&) = delete;

  int workers() const { return workers_; }
  void begin(Job job);  // starts the workers and returns; one job at a time
  void join();          // works until the job is finished
  void run(Job job) {
    begin(std::move(job));
    join();
  }

 private:
  // Phase number, members and finished members in one atomic word.
  struct State {
    uint32_t turn;  // counts phases, and the times between jobs
    bool open;      // a job is running: workers may join
    int32_t members, arrived;

    static State of(uint64_t word);
    uint64_t word() const;
    bool ends() const { return members > 0 && arrived == members; }
  };

  // Rings whenever the turn changes. Threads wait on it instead of on the state, which each of them changes.
  struct alignas(64) Bell {
    int32_t rung = 0;
    int32_t sleepers = 0;
    int32_t heard() const;
    void ring();  // and wakes the sleepers
  };

  State state() const { return State::of(__atomic_load_n(&state_, __ATOMIC_SEQ_CST)); }
  void serve(int worker);
  State take_part(int worker);  // in the running job, if any; returns the state without one
  State enter();
  State leave(State mine, int worker);
  void become(const State& next);
  void wait_while(uint32_t turn, int32_t heard, int spins, int worker);
  void leave_shared_cpu(int worker);
  void stop();

  const int workers_;
  const bool cpus_suffice_;  // one for every worker
  std::vector<std::thread> threads_;
  Job job_;
  uint32_t first_ = 0;  // the turn of its first phase
  bool stopping_ = false;
  Bell bell_;
  alignas(64) uint64_t state_ = 0;
  std::vector<int32_t> cpu_of_;  // where each worker was last seen
};

}  // namespace millrace
