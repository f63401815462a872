// A step of a language model over an executor: tokens of any mix of sequences in, drawn tokens out.
#pragma once
#include <memory>
#include <vector>

#include "executor.hpp"
#include "sampling.hpp"

namespace millrace {

class LanguageModel {
 public:
  LanguageModel(const mr_create_args& args, Executor& executor);
  int32_t embedding_width() const { return embedding_width_; }
  int32_t adapters() const { return adapters_; }
  void launch(const mr_step& step);  // what it points at stays as it is until the executor's `wait` has returned

 private:
  // Where the program's inputs and its logits lie in the activations; null where it has none.
  struct Places {
    int32_t *tokens, *positions, *lengths, *rows, *adapters;
    float* logits;
  };

  void check(const mr_step& step) const;
  void check_window(const mr_step& step, const mr_window& window, const mr_window_pages& pages) const;
  void check_slots(const mr_step& step);
  void check_rows(const mr_step& step) const;
  void write_inputs(const mr_step& step);
  void sample_rows(StepContext& context, int worker);

  Executor& executor_;
  const int32_t max_tokens_, max_sequences_, max_rows_, max_context_, vocab_size_;
  Places places_;
  mr_step step_{};  // the one that is under way
  std::vector<int32_t> sequence_of_;
  std::vector<std::vector<int32_t>> offsets_;  // of each window: (S), see PageTable
  std::vector<PageTable> tables_;
  std::vector<uint32_t> slot_seen_;  // of each slot: the last step that named it
  uint32_t n_steps_ = 0;
  int32_t embedding_width_ = 0;  // of the rows that tokens are looked up in; 0: there is no such table
  bool has_row_sizes_ = false;   // whether sizes are made of R
  int32_t adapters_ = 1;         // rows of the tables that adapters are looked up in
  std::vector<std::unique_ptr<Arena>> sampling_;  // one a worker
};

}  // namespace millrace
