#include "sampling.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace millrace {

double uniform(uint64_t seed, uint32_t choice, uint32_t position) {
  uint32_t counter[4] = {position, choice, 0, 0};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = 0xD2511F53ull * counter[0], b = 0xCD9E8D57ull * counter[2];
    const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
                              static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    std::memcpy(counter, next, sizeof next);
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  const uint64_t bits = (static_cast<uint64_t>(counter[0]) << 32 | counter[1]) >> 11;
  return static_cast<double>(bits) * 0x1p-53;
}

// log(2^e m) = e ln2 + 2 atanh(s), s = (m-1)/(m+1), m in [1/sqrt2, sqrt2): the odd series to s^19 is exact to 1e-15.
double natural_log(double x) {
  int e;
  double m = std::frexp(x, &e);
  if (m < 0.70710678118654752) {
    m *= 2;
    --e;
  }
  const double s = (m - 1) / (m + 1), s2 = s * s;
  double series = 0;
  for (int k = 19; k >= 1; k -= 2) series = series * s2 + 1.0 / k;
  return e * 0.69314718055994531 + 2 * s * series;
}

namespace {

constexpr float kGreedyBelow = 1e-5f;  // 1/temperature would leave the range of float

double total(const float* sums, int64_t n) {
  double all = 0;
  for (int64_t b = 0; b * kSampleBlock < n; ++b) all += sums[b];
  return all;
}

// Adds the biases and applies the penalties; remembers each touched logit, so that the raw ones can come back.
class Adjusted {
 public:
  Adjusted(float* logits, const SamplingRow& row, const SamplingInputs& in, SamplingScratch& s)
      : logits_(logits), scratch_(s) {
    for (int i = 0; i < row.bias_count; ++i) {
      const int32_t id = in.bias_ids[row.bias_start + i];
      remember(id);
      logits_[id] += in.bias_values[row.bias_start + i];
    }
    if (row.repetition_penalty == 1.0f && row.presence_penalty == 0.0f && row.frequency_penalty == 0.0f) return;
    const int32_t* history = in.history + row.history_start;
    penalise(row, history, row.history_prompt, row.history_output);
  }

  void restore() {
    while (n_ > 0) {
      --n_;
      logits_[scratch_.touched[n_]] = scratch_.before[n_];
    }
  }

 private:
  void remember(int32_t id) {
    scratch_.touched[n_] = id;
    scratch_.before[n_++] = logits_[id];
  }

  // counts: times in the output, plus 2^30 once the token was seen at all.
  void penalise(const SamplingRow& row, const int32_t* history, int64_t prompt, int64_t output) {
    constexpr int32_t kSeen = 1 << 30;
    int32_t* counts = scratch_.counts;
    for (int64_t i = 0; i < prompt; ++i) counts[history[i]] |= kSeen;
    for (int64_t i = prompt; i < prompt + output; ++i) counts[history[i]] = (counts[history[i]] | kSeen) + 1;
    for (int64_t i = 0; i < prompt + output; ++i) {
      const int32_t id = history[i], times = counts[id] & (kSeen - 1);
      if (!counts[id]) continue;
      counts[id] = 0;
      remember(id);
      float& x = logits_[id];
      x = x > 0 ? x / row.repetition_penalty : x * row.repetition_penalty;
      if (times) x -= row.presence_penalty + row.frequency_penalty * static_cast<float>(times);
    }
  }

  float* logits_;
  SamplingScratch& scratch_;
  int64_t n_ = 0;
};

int32_t first_largest(const SamplePasses& passes, const float* x, int64_t n, float m, int32_t* found) {
  passes.collect(x, n, m, found);
  return found[0];
}

// The weakest of the kept: everything above `p` is kept, and of those equal to it the ids up to `id`.
struct Cut {
  float p = 0;
  int32_t id = INT32_MAX;
  bool keeps(float value, int32_t candidate) const { return value > p || (value == p && candidate <= id); }
};

// Buckets by exponent and four bits of fraction, so that only one bucket's members need an order.
constexpr int kBuckets = 4096;
int bucket(float p) {
  uint32_t bits;
  std::memcpy(&bits, &p, 4);
  return static_cast<int>(bits >> 19);
}

// Where the kept ones end: after `count` candidates, or once they weigh `mass` (the one that reaches it is kept).
Cut find_cut(const float* p, int32_t* ids, int64_t n, int64_t count, double mass) {
  double weights[kBuckets] = {};
  int64_t counts[kBuckets] = {};
  for (int64_t i = 0; i < n; ++i) {
    const int b = bucket(p[ids[i]]);
    weights[b] += p[ids[i]];
    ++counts[b];
  }
  int b = kBuckets - 1;
  for (; b > 0 && counts[b] < count && weights[b] < mass; --b) {
    count -= counts[b];
    mass -= weights[b];
  }
  int32_t* end = std::partition(ids, ids + n, [&](int32_t id) { return bucket(p[id]) == b; });
  std::sort(ids, end, [&](int32_t x, int32_t y) { return p[x] > p[y] || (p[x] == p[y] && x < y); });
  Cut cut;
  for (int32_t* at = ids; at != end && count > 0 && mass > 0; ++at, --count) {
    cut = {p[*at], *at};
    mass -= p[*at];
  }
  return cut;
}

// The candidates, few where the distribution is peaked: a floor on p is lowered until they are enough.
int64_t candidates(const SamplePasses& passes, const SamplingRow& row, int64_t n, double all, SamplingScratch& s) {
  const int64_t want = row.top_k > 0 ? std::min<int64_t>(row.top_k, n) : 0;
  for (const float floor : {0x1p-10f, 0x1p-20f, 0.0f}) {
    const float lowest = std::max(floor, row.min_p);
    const int64_t found = passes.collect(s.p, n, lowest, s.kept);
    if (lowest == row.min_p || floor == 0.0f) return found;
    if (want && found >= want) return found;
    if (want == 0 && row.top_p < 1.0f) {
      double mass = 0;
      for (int64_t i = 0; i < found; ++i) mass += s.p[s.kept[i]];
      if (mass >= static_cast<double>(row.top_p) * all) return found;
    }
  }
  return 0;  // not reached: the last floor takes everything
}

// Drops what top_k, then top_p, leaves out. kept comes back in ascending order of ids; gives its size.
int64_t filter(const SamplePasses& passes, const SamplingRow& row, int64_t n, double all, SamplingScratch& s) {
  int64_t found = candidates(passes, row, n, all, s);
  const auto apply = [&](int64_t count, double mass) {
    const Cut cut = find_cut(s.p, s.kept, found, count, mass);
    int32_t* end = std::remove_if(s.kept, s.kept + found, [&](int32_t id) { return !cut.keeps(s.p[id], id); });
    found = end - s.kept;
    std::sort(s.kept, end);
  };
  if (row.top_k > 0 && row.top_k < found) apply(row.top_k, HUGE_VAL);
  if (row.top_p < 1.0f) {
    double mass = row.top_k > 0 || row.min_p > 0 ? 0 : all;
    if (mass == 0)
      for (int64_t i = 0; i < found; ++i) mass += s.p[s.kept[i]];
    apply(INT64_MAX, mass * static_cast<double>(row.top_p));
  }
  return found;
}

int32_t draw_kept(const SamplingScratch& s, int64_t found, double u) {
  double mass = 0, reached = 0;
  for (int64_t i = 0; i < found; ++i) mass += s.p[s.kept[i]];
  for (int64_t i = 0; i + 1 < found; ++i) {
    reached += s.p[s.kept[i]];
    if (reached > u * mass) return s.kept[i];
  }
  return s.kept[found - 1];
}

int32_t draw_any(const SamplingScratch& s, int64_t n, double all, double u) {
  double reached = 0;
  int64_t b = 0;
  for (; (b + 1) * kSampleBlock < n && reached + s.sums[b] <= u * all; ++b) reached += s.sums[b];
  const int64_t end = std::min((b + 1) * kSampleBlock, n);
  int64_t last = b * kSampleBlock;  // the block's sum is rounded: where it runs out, the last possible token is it
  for (int64_t i = b * kSampleBlock; i < end; ++i) {
    if (s.p[i] > 0) last = i;
    reached += s.p[i];
    if (reached > u * all) return static_cast<int32_t>(i);
  }
  return static_cast<int32_t>(last);
}

int32_t choose(const SamplePasses& passes, float* logits, int64_t n, const SamplingRow& row, SamplingScratch& s) {
  const float m = passes.max(logits, n);
  if (row.temperature < kGreedyBelow || row.top_k == 1) return first_largest(passes, logits, n, m, s.kept);
  passes.exp(logits, n, m, 1.0f / row.temperature, s.p, s.sums);
  const double all = total(s.sums, n);
  const double u = uniform(row.seed, static_cast<uint32_t>(row.choice), static_cast<uint32_t>(row.position));
  if (row.top_k <= 0 && row.top_p >= 1.0f && row.min_p <= 0.0f) return draw_any(s, n, all, u);
  return draw_kept(s, filter(passes, row, n, all, s), u);
}

}  // namespace

Sampled sample(const SamplePasses& passes, float* logits, int64_t n, const SamplingRow& row, const SamplingInputs& in,
               SamplingScratch& scratch, int32_t* top_ids, float* top_logprobs) {
  const float m = passes.max(logits, n);
  if (!std::isfinite(m)) return {-1, 0.0f, 0};
  float log_sum = 0;
  if (row.n_top >= 0) {
    passes.exp(logits, n, m, 1.0f, nullptr, scratch.sums);
    log_sum = static_cast<float>(natural_log(total(scratch.sums, n)));
  }
  if (row.n_top > 0) {
    passes.top(logits, n, row.n_top, top_ids, top_logprobs);
    for (int i = 0; i < row.n_top; ++i) top_logprobs[i] = top_logprobs[i] - m - log_sum;
  }
  Adjusted adjusted(logits, row, in, scratch);
  Sampled out{choose(passes, logits, n, row, scratch), 0.0f, 0};
  if (row.n_top >= 0) {
    adjusted.restore();
    out.logprob = logits[out.token] - m - log_sum;
    out.rank = static_cast<int32_t>(passes.rank(logits, n, logits[out.token])) + 1;
  }
  return out;
}

}  // namespace millrace
