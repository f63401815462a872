// A team of threads that works through the phases of one job at a time, together with the caller once it joins them.
//
// Nobody is waited for who has not begun: a thread that the system has not woken yet, because its CPU has other work,
// joins the phase that runs by then. A phase has ended when all who joined are done with it.
#pragma once
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace millrace {

class Pool {
 public:
  struct Job {
    // A worker's part of a phase. Whoever comes takes what is left: it may be one worker who does all of it.
    std::function<void(int worker, int phase)> work;
    int phases = 1;  // at least
    std::function<void(int phase)> ended;  // by one of them, before the next phase begins; may be empty
  };

  explicit Pool(int workers);  // the caller is worker 0; workers - 1 threads are started
  ~Pool();                     // of a pool whose job has been joined
  Pool(const Pool&) = delete;

  int workers() const { return workers_; }
  void begin(Job job);  // the others begin, and the caller goes on; one job at a time
  void join();          // takes part in what is left, and returns when the job is through
  void run(Job job) {
    begin(std::move(job));
    join();
  }

 private:
  // Which phase it is, how many take part in it and how many of them are done, in one word: all that changes at once.
  struct State {
    uint32_t turn;  // counts phases, and the times between jobs
    bool open;      // a job is under way: workers may join
    int32_t members, arrived;

    static State of(uint64_t word);
    uint64_t word() const;
    bool ends() const { return members > 0 && arrived == members; }
  };

  // Rings whenever the turn changes. Threads listen to it, not to the state, which each of them changes.
  struct alignas(64) Bell {
    int32_t rung = 0;
    int32_t sleepers = 0;
    int32_t heard() const;
    void ring();  // and wakes whoever sleeps
  };

  State state() const { return State::of(__atomic_load_n(&state_, __ATOMIC_SEQ_CST)); }
  void serve(int worker);
  State take_part(int worker);  // in the job that is under way, if one is; the state in which there was none
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
