// Runs a program: owns its threads, and huge-page arenas for weights, activations and caches.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "isa.hpp"
#include "millrace.h"
#include "pool.hpp"
#include "sizes.hpp"

namespace millrace {

// A huge-page allocation with one owner.
class Arena {
 public:
  Arena(int64_t bytes, const char* what);
  ~Arena();
  Arena(const Arena&) = delete;
  uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  uint8_t* data_;
  int64_t bytes_;
};

// Page table of the sequences in a run, see Cache.
struct PageTable {
  const int32_t *pages, *offsets;
};

// Inputs of a run besides those in the activations. Pointers must stay valid until the run ends.
struct RunInputs {
  const int32_t* sizes;  // of the program's symbols
  Sequences sequences;
  const PageTable* tables;  // by number, for caches that are kept between runs
  const int32_t *states_from, *states_to;  // (S)
  EmbeddingRows embeddings;
};

class Executor {
 public:
  explicit Executor(const mr_create_args& args);
  // `last` is run by every worker after the program, as one more task list.
  using Last = std::function<void(StepContext& context, int worker)>;
  // Starts a run on the other threads; `wait` joins them and returns when it is finished. One run at a time.
  void launch(const RunInputs& inputs, Last last);
  void wait();
  bool is_running() const { return running_; }
  void compute(const int32_t* sizes);  // not a language model: nothing is kept between runs
  void set_tactics(const mr_tactic* tactics, int64_t n);

  uint8_t* activations() const { return activations_.data(); }
  const Arena& weights() const { return weights_; }
  const Isa& isa() const { return isa_; }
  const Bounds& bounds() const { return bounds_; }
  int workers() const { return pool_.workers(); }
  bool keeps() const { return !kept_.empty() || !states_.empty(); }  // anything between runs
  bool keeps_all() const { return kept_.size() == caches_.size(); }
  bool has_size_of(int32_t symbol) const { return sizes_.uses(symbol); }
  bool has_table(int32_t table) const;  // whether a cache uses this page table
  int64_t kept_pages() const { return kept_pages_; }
  const std::vector<mr_window>& windows() const { return windows_; }
  int64_t state_slots() const { return states_.empty() ? 0 : states_.front().slots; }
  void copy_page(int32_t table, int32_t from, int32_t to);  // in all caches that use this table
  uint8_t* kept(size_t cache) const { return cache < kept_.size() ? kept_[cache]->data() : nullptr; }
  const std::vector<Call>& program() const { return program_; }
  const std::vector<Tactic>& chosen_tactics() const { return chosen_; }
  void profile(bool enabled, double* seconds, int n_calls);

 private:
  void load_weights(const mr_create_args& args);
  void make_caches(const mr_create_args& args);
  void make_states(const mr_create_args& args);
  void check_caches() const;
  void choose_tactics(const int32_t* sizes);
  void find_sequences(const int32_t* sizes);
  void work(int worker, int phase);

  const Isa& isa_;
  const int32_t n_symbols_;
  Sizes sizes_;
  const std::vector<int32_t> symbols_;  // how large each may be, then each of the sizes that are made of them
  const std::vector<mr_window> windows_;
  const int64_t lengths_offset_, kept_pages_;
  Arena weights_, activations_;
  const Bounds bounds_;
  std::vector<std::unique_ptr<Arena>> kept_;  // one a cache that is kept
  std::vector<Cache> caches_;
  std::vector<std::unique_ptr<Arena>> state_arenas_;
  std::vector<States> states_;
  std::vector<int32_t> state_layers_;  // of each kind
  std::vector<int32_t> tables_;         // of each cache: the number of its page table; kTransient: it lives for one run
  std::vector<Call> program_;
  std::vector<mr_tactic> tactics_;      // in order of call, then rows
  std::vector<size_t> tactics_of_;      // where each call's begin; one more
  std::vector<Tactic> chosen_;          // of each call, for the rows of this run
  std::vector<int32_t> next_task_;
  std::vector<int32_t> starts_, positions_, sequence_of_, own_pages_, own_offsets_;  // of compute()
  std::vector<std::unique_ptr<Arena>> scratch_;  // one a worker
  Pool pool_;
  Arena shared_;  // all workers'
  StepContext run_{};  // the current run, copied by each worker
  Last last_;
  bool running_ = false, profiling_ = false;
  std::vector<double> seconds_;
};

uint64_t checksum(const uint8_t* data, int64_t bytes);

}  // namespace millrace
