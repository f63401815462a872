// A row of logits as sampling looks at it: maxima by block, weights, thresholds, and lists of what lies above one.
#pragma once
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "sampling.hpp"

namespace millrace {

inline double total(const float* sums, int64_t n) {
  double all = 0;
  for (int64_t b = 0; b * kSampleBlock < n; ++b) all += sums[b];
  return all;
}

// A bisection for the largest threshold with enough from it on: `count` logits, or (with p) the weight `mass`. Not
// rescore's, which takes logits that are not finite and goes on to the last bit: here each pass is over a whole row.
struct Search {
  const SamplePasses& passes;
  const float *x, *p;  // p may be null
  int64_t n, count;
  double mass;
  float enough, too_few;              // a threshold that leaves enough, and one that does not
  int64_t n_enough = n, n_above = 0;  // logits from each of them on
  double mass_enough = 0, mass_above = 0;

  // From too high a threshold down, by doubled steps.
  void widen() {
    for (float step = 1; (n_enough = passes.count(x, n, enough)) < count; step *= 2) {
      too_few = enough;
      n_above = n_enough;
      enough -= step;
    }
  }

  // Until at most `few` lie between the two. False where more do, and all of them equal `enough`.
  bool narrow(int64_t few) {
    while (n_enough - n_above > few) {
      const float middle = enough / 2 + too_few / 2;  // their difference may be beyond all floats
      if (!(middle > enough && middle < too_few)) return false;
      double weight = 0;
      const int64_t found = p ? passes.mass(x, p, n, middle, weight) : passes.count(x, n, middle);
      if (found >= count || weight >= mass) {
        enough = middle;
        n_enough = found;
        mass_enough = weight;
      } else {
        too_few = middle;
        n_above = found;
        mass_above = weight;
      }
    }
    return true;
  }
};

// Places in x, the larger first, of equals the lower.
struct Better {
  const float* x;
  bool operator()(int32_t a, int32_t b) const { return x[a] > x[b] || (x[a] == x[b] && a < b); }
};

// Subnormal thresholds would count as 0.
inline float next_above(float x) { return x >= 0 && x < FLT_MIN ? FLT_MIN : std::nextafter(x, HUGE_VALF); }

// A row of logits with the weights p = exp((x - m) / temperature), m the largest logit, and a list of some of them.
class Row {
 public:
  Row(const SamplePasses& passes, const float* x, int64_t n, float temperature, SamplingScratch& s)
      : passes(passes), x(x), n(n), s(s), temperature(temperature), scale(1.4426950408889634f / temperature) {}

  // False where a logit is not finite.
  bool look() {
    m = passes.look(x, n, s.most);
    return std::isfinite(m);
  }

  // A first look with the sums of all weights; of a band's as well, and what lies in it is listed.
  bool weigh(const Band* band) {
    Weights w{s.most, s.references, s.all_sums, s.sums, s.ids, 0, 0};
    passes.weigh(x, n, scale, band, w);
    m = w.m;
    gather(w.found);
    return std::isfinite(m);
  }

  // Lists all from `floor` on; blocks whose largest logit lies below it are passed over.
  void list(float floor) {
    int64_t found = 0;
    for (int64_t from = 0; from < n; from += kLookBlock)
      if (s.most[from / kLookBlock] >= floor)
        found += passes.collect(x, from, std::min(from + kLookBlock, n), floor, HUGE_VALF, s.ids + found);
    gather(found);
  }

  // A threshold from which on at least `count` <= n logits lie, but not many more: one in each of `count` blocks.
  float floor_of(int64_t count) const {
    const bool by_block = 2 * count <= blocks();
    Search search{passes, by_block ? s.most : x, nullptr, by_block ? blocks() : n, count, HUGE_VAL, m, next_above(m)};
    search.widen();
    search.narrow(by_block ? 4 : 64);
    return search.enough;
  }

  int32_t first_largest() const {
    const int64_t at = passes.find(s.most, blocks(), m) * kLookBlock;
    return static_cast<int32_t>(at + passes.find(x + at, n - at, m));
  }

  // The logit that weighs p.
  float logit_of(double p) const { return static_cast<float>(m + natural_log(p) * temperature); }

  const SamplePasses& passes;
  const float* x;
  int64_t n;
  SamplingScratch& s;
  float temperature, scale, m = 0;
  int64_t listed = 0;      // in s.ids, their logits in s.x, their weights in s.p,
  double listed_mass = 0;  // and the sum of those

 private:
  int64_t blocks() const { return (n + kLookBlock - 1) / kLookBlock; }

  void gather(int64_t found) {
    listed = found;
    for (int64_t i = 0; i < found; ++i) s.x[i] = x[s.ids[i]];
    passes.exp2(s.x, found, m, scale, s.p, s.cut_sums);
    listed_mass = total(s.cut_sums, found);
  }
};

// The k likeliest, best first, equal ones by lower id; the row was looked at.
inline void list_top(Row& row, int k, int32_t* ids, float* values) {
  row.list(row.floor_of(k));
  const SamplingScratch& s = row.s;
  for (int64_t i = 0; i < row.listed; ++i) s.order[i] = static_cast<int32_t>(i);
  std::partial_sort(s.order, s.order + k, s.order + row.listed, Better{s.x});
  for (int i = 0; i < k; ++i) {
    ids[i] = s.ids[s.order[i]];
    values[i] = s.x[s.order[i]];
  }
}

}  // namespace millrace
