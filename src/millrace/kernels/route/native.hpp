// route   the experts of each row, by their scores from its logits      x (T, n) at x_stride | weights, experts (T, chosen)
//   scores: softmax or sigmoid of the logits. The experts with the largest scores + bias, of equal ones the first; their
//   weights are the scores alone. sparsemixer: each expert's share among the logits close to it, one expert after another.
//   A row without numbers (NaN) still has `chosen` different experts.
#pragma once
#include "softmax/native.hpp"
namespace millrace::MILLRACE_ISA {

constexpr int kMaxExperts = 1024;

struct ExpertSet {
  uint64_t words[kMaxExperts / 64] = {};

  void add(int e) { words[e / 64] |= uint64_t{1} << (e % 64); }
  bool has(int e) const { return words[e / 64] >> (e % 64) & 1; }
};

// The first of the largest values in [from, to) that is not taken.
inline int best_of(const float* values, const ExpertSet& taken, int from, int to) {
  int best = -1;
  for (int e = from; e < to; ++e)
    if (!taken.has(e) && (best < 0 || values[e] > values[best])) best = e;
  return best;
}

inline float sum_of_best(const float* values, int from, int to, int count) {
  ExpertSet taken;
  float total = 0;
  for (int i = 0; i < count; ++i) {
    const int e = best_of(values, taken, from, to);
    taken.add(e);
    total += values[e];
  }
  return total;
}

inline void sigmoid_scores(const float* x, int n, float* scores) {
  const F one = splat(1.0f);
  each_vector(0, n, [&](int64_t i, auto lanes) {
    lanes.store(scores + i, one / (one + exp(zero() - lanes.load(x + i))));
  });
}

// exp(x - top) of the experts that are left and whose logits are close to the largest of those; otherwise 0.
inline void shares_of(const RouteArgs& a, const float* x, const ExpertSet& taken, float top, float* shares) {
  for (int e = 0; e < a.n; ++e) {
    const float magnitude = __builtin_fabsf(x[e]), factor = magnitude > top ? magnitude : top;
    shares[e] = !taken.has(e) && !((top - x[e]) / factor > a.epsilon) ? x[e] - top : -__builtin_inff();
  }
  each_vector(0, a.n, [&](int64_t i, auto lanes) { lanes.store(shares + i, exp(lanes.load(shares + i))); });
}

inline void choose_by_shares(const RouteArgs& a, const float* x, float* shares, float* weights, int32_t* experts) {
  ExpertSet taken;
  for (int j = 0; j < a.chosen; ++j) {
    const int expert = best_of(x, taken, 0, a.n);
    shares_of(a, x, taken, x[expert], shares);
    float total = 0;
    for (int e = 0; e < a.n; ++e) total += shares[e];
    weights[j] = a.scale / total;
    experts[j] = expert;
    taken.add(expert);
  }
}

inline void choose_by_scores(const RouteArgs& a, const float* scores, float* choice, float* weights, int32_t* experts) {
  for (int e = 0; e < a.n; ++e) choice[e] = scores[e] + (a.bias ? a.bias[e] : 0.0f);
  ExpertSet taken;
  if (a.chosen_groups < a.groups) {
    const int size = a.n / a.groups;
    float of_groups[kMaxExperts];
    ExpertSet open;
    for (int g = 0; g < a.groups; ++g) of_groups[g] = sum_of_best(choice, g * size, (g + 1) * size, a.group_best);
    for (int i = 0; i < a.chosen_groups; ++i) open.add(best_of(of_groups, open, 0, a.groups));
    for (int e = 0; e < a.n; ++e)
      if (!open.has(e / size)) taken.add(e);
  }
  float total = 0;
  for (int j = 0; j < a.chosen; ++j) {
    experts[j] = best_of(choice, taken, 0, a.n);
    taken.add(experts[j]);
    weights[j] = scores[experts[j]];
    total += weights[j];
  }
  const float factor = a.normalise ? total + a.epsilon : 1.0f;
  for (int j = 0; j < a.chosen; ++j) weights[j] = weights[j] / factor * a.scale;
}

inline void route(const RouteArgs& a, StepContext& c) {
  float *scores = c.scratch, *choice = c.scratch + a.n;
  for (Chunk chunk(c, c.sizes[a.rows], 8); chunk.next();)
    for (int64_t row = chunk.begin; row < chunk.end; ++row) {
      const float* x = a.x + row * a.x_stride;
      float* weights = a.weights + row * a.chosen;
      int32_t* experts = a.experts + row * a.chosen;
      if (a.scoring == 2) {
        choose_by_shares(a, x, scores, weights, experts);
        continue;
      }
      if (a.scoring == 0)
        softmax_row(x, a.n, scores);
      else
        sigmoid_scores(x, a.n, scores);
      choose_by_scores(a, scores, choice, weights, experts);
    }
}

}  // namespace millrace::MILLRACE_ISA
