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
  void launch(const mr_step& step);  // what it points at stays as it is until the executor's `wait` has returned

 private:
  // Where the program's inputs and its logits lie in the activations; null where it has none.
  struct Places {
    int32_t *tokens, *positions, *lengths, *rows;
    float* logits;
  };

  void check(const mr_step& step) const;
  void check_rows(const mr_step& step) const;
  void write_inputs(const mr_step& step);
  void sample_rows(StepContext& context, int worker);

  Executor& executor_;
  const int32_t max_tokens_, max_sequences_, max_rows_, max_context_, vocab_size_;
  Places places_;
  mr_step step_{};  // the one that is under way
  std::vector<int32_t> sequence_of_;
  std::vector<std::unique_ptr<Arena>> sampling_;  // one a worker
};

}  // namespace millrace
