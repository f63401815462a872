// Greedy tokens from an engine through the C interface alone, for machines that have no Python:
//   greedy PROGRAM WEIGHTS ISA N_TOKENS activation_bytes max_context vocab_size T S R
//          tokens_offset positions_offset rows_offset logits_offset
//          format layers heads key_dim value_dim (of the cache) : PROMPT_TOKEN ...
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

#include "sampling.hpp"
#include "millrace.h"

int main(int argc, char** argv) {
  if (argc < 22) return 2;
  std::ifstream file(argv[1], std::ios::binary), packed(argv[2], std::ios::binary | std::ios::ate);
  const std::vector<uint8_t> program{std::istreambuf_iterator<char>(file), {}};
  const auto number = [&](int i) { return static_cast<int32_t>(std::atoi(argv[i])); };
  mr_create_args args{};
  args.program = program.data();
  args.program_bytes = static_cast<int64_t>(program.size());
  args.weights_path = argv[2];
  args.weights_bytes = packed.tellg();
  args.activation_bytes = std::atoll(argv[5]);
  mr_language_model language{};
  language.max_context = number(6), language.vocab_size = number(7);
  args.language = &language;
  const int32_t symbols[3] = {number(8), number(9), number(10)};
  args.symbols = symbols, args.n_symbols = 3;
  language.tokens_offset = std::atoll(argv[11]), language.positions_offset = std::atoll(argv[12]);
  language.rows_offset = std::atoll(argv[13]), language.logits_offset = std::atoll(argv[14]);
  language.adapters_offset = -1;
  args.lengths_offset = -1;
  const mr_cache cache{number(15), number(16), number(17), number(18), number(19), -1};
  args.caches = &cache, args.n_caches = 1;
  args.kv_pages = (language.max_context + 63) / 64;
  args.threads = 2;
  args.isa = argv[3];
  char error[512];
  mr_engine* engine = nullptr;
  if (mr_create(&args, &engine, error, sizeof error)) return std::fprintf(stderr, "%s\n", error), 1;

  std::vector<int32_t> tokens, positions, pages;
  for (int i = 21; i < argc; ++i) tokens.push_back(number(i));
  for (int32_t p = 0; p < args.kv_pages; ++p) pages.push_back(p);
  millrace::SamplingRow row{};
  row.target = -1;
  row.top_p = 1;
  row.repetition_penalty = 1;
  row.n_top = -1;
  int32_t at = 0, out_token, out_rank;
  float out_logprob;
  for (int n = number(4); n > 0; --n) {
    positions.clear();
    for (size_t i = 0; i < tokens.size(); ++i) positions.push_back(at++);
    const int32_t starts[2] = {0, static_cast<int32_t>(tokens.size())}, page_starts[2] = {0, static_cast<int32_t>(pages.size())};
    mr_step step{};
    step.n_tokens = starts[1], step.n_sequences = 1, step.n_rows = 1;
    step.tokens = tokens.data(), step.positions = positions.data(), step.starts = starts;
    step.pages = pages.data(), step.page_starts = page_starts, step.n_pages = page_starts[1];
    step.sampling = &row;
    step.out_tokens = &out_token, step.out_logprobs = &out_logprob, step.out_ranks = &out_rank;
    if (mr_launch(engine, &step, error, sizeof error)) return std::fprintf(stderr, "%s\n", error), 1;
    mr_wait(engine);
    std::printf("%d ", out_token);
    tokens.assign(1, out_token);
  }
  mr_destroy(engine);
}
