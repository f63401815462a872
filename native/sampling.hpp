// From one row of logits to one token, and what the caller wants to know of it.
#pragma once
#include "isa.hpp"

namespace millrace {

// One row of millrace.engine.executor.SAMPLING.
struct SamplingRow {
  int32_t token, choice;
  uint64_t seed;
  int32_t position, top_k;
  float temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty;
  int32_t n_top, history_start, history_prompt, history_output, bias_start, bias_count;
  int32_t target;  // -1: a token is drawn; else its log probability is wanted
  int32_t mask;    // what may be drawn: masks[mask - 1]; 0: everything
};
static_assert(sizeof(SamplingRow) == 80);

constexpr int32_t kNotFinite = -1, kNothingAllowed = -2;  // in place of a token

struct Sampled {
  int32_t token;
  float logprob;
  int32_t rank;
};

struct SamplingInputs {
  const int32_t* history;
  const int32_t* bias_ids;
  const float* bias_values;
  const uint32_t* masks;
};

// A worker's memory for sampling: allocated once, for the vocabulary.
struct SamplingScratch {
  int32_t* ids;       // (V + 16) listed tokens, ascending,
  float *x, *p;       // (V) their logits and weights,
  int32_t* order;     // (V + 16) and places in that list
  int32_t* counts;    // (V) zero between rows
  int32_t* touched;   // (2 V) biased and penalised tokens,
  float* before;      // (2 V) and their raw logits
  float* most;        // (V / kLookBlock + 1) per block: the largest logit;
  float* references;  // (V / kSampleBlock + 1) what it was weighed against,
  float* all_sums;    // the weights of all,
  float* sums;        // of what is surely kept,
  float* cut_sums;    // of what is looked at
  int32_t* allowed;   // (V) tokens that a mask allows, ascending,
  float* gathered;    // (V) and their logits
};

// logits (V) are used as working memory. top_ids and top_logprobs take wanted.n_top entries where it is above 0; where a
// mask allows fewer tokens, the other ids are -1.
Sampled sample(const SamplePasses& passes, float* logits, int64_t n, const SamplingRow& wanted, const SamplingInputs& in,
               SamplingScratch& scratch, int32_t* top_ids, float* top_logprobs);

// Uniform in [0, 1), 53 bits: Philox 4x32-10 (Salmon et al., SC 2011) with the seed as key.
double uniform(uint64_t seed, uint32_t choice, uint32_t position);
double natural_log(double x);  // our own, for equal bits everywhere; x > 0

}  // namespace millrace
