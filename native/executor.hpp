// Runs a program: its weights, activations and KV pages in huge-page arenas, a step as one call, its threads its own.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "isa.hpp"
#include "millrace.h"
#include "pool.hpp"
#include "sampling.hpp"

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

class Executor {
 public:
  explicit Executor(const mr_create_args& args);
  void run(const mr_step& step);
  void set_tactics(const mr_tactic* tactics, int64_t n);

  uint8_t* activations() const { return activations_.data(); }
  const Arena& weights() const { return weights_; }
  const Isa& isa() const { return isa_; }
  const std::vector<Tactic>& chosen_tactics() const { return chosen_; }
  void profile(bool enabled, double* seconds, int n_steps);

 private:
  void load_weights(const mr_create_args& args);
  void check(const mr_step& step) const;
  void check_rows(const mr_step& step) const;
  void prepare(const mr_step& step);
  void choose_tactics(const mr_step& step);
  void work(const mr_step& step, int worker);
  void sample_rows(const mr_step& step, StepContext& context, int worker);

  const Isa& isa_;
  const int32_t max_tokens_, max_sequences_, max_context_, vocab_size_;
  const int64_t logits_offset_;
  Arena weights_, activations_, kv_arena_;
  KvLayout kv_;
  std::vector<Step> program_;
  std::vector<mr_tactic> tactics_;      // in order of step, then rows
  std::vector<size_t> tactics_of_;      // where each step's begin; one more
  std::vector<Tactic> chosen_;          // of each step, for the rows of this one
  std::vector<int32_t> next_task_, sequence_of_, row_tokens_;
  std::vector<std::unique_ptr<Arena>> scratch_, sampling_;  // one a worker
  Pool pool_;
  Arena shared_;  // all workers'
  bool profiling_ = false;
  std::vector<double> seconds_;
};

uint64_t checksum(const uint8_t* data, int64_t bytes);

}  // namespace millrace
