#include "sampling.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>

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

  bool changed() const { return n_ > 0; }

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

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// The weakest of the kept: what is above `p` is kept, and of those equal to it the ids up to `id`.
struct Cut {
  float p;
  int32_t id;
};

// A bisection over the bits of p for the lowest threshold with enough above it: `count` elements, or the weight `mass`.
struct Search {
  const SamplePasses& passes;
  const float* p;
  int64_t n, count;
  double mass;
  float* sums;
  uint32_t enough = 0, too_few = 0x3f800001u;  // p is at most 1
  int64_t n_enough = n, n_above = 0;           // elements from each threshold on
  double mass_above = 0;

  void look(uint32_t bits) {
    const int64_t found = passes.above(p, n, from_bits(bits), sums);
    const double weight = total(sums, n);
    if (found >= count || weight >= mass) {
      enough = bits;
      n_enough = found;
    } else {
      too_few = bits;
      n_above = found;
      mass_above = weight;
    }
  }
  bool done(int64_t few) const { return too_few - enough <= 1 || n_enough - n_above <= few; }
  void bisect(int64_t few) {
    while (!done(few)) look(enough + (too_few - enough) / 2);
  }
  // From a guess outwards in growing strides until it lies between the thresholds.
  void bracket(uint32_t guess) {
    const uint32_t top = too_few;
    look(guess);
    for (uint32_t stride = 1 << 17; !done(0) && (enough == 0 || too_few == top); stride = std::min(stride, 1u << 26) * 8)
      look(enough == 0 ? (too_few > stride ? too_few - stride : 1) : std::min(enough + stride, top - 1));
  }
};

// Every sixteenth vector of p stands for all of it: a good guess for a sixteenth of the work.
uint32_t guess_threshold(const Search& whole, float* sample) {
  int64_t n = 0;
  for (int64_t i = 0; i + 16 <= whole.n; i += 256, n += 16) std::memcpy(sample + n, whole.p + i, 64);
  const int64_t count = whole.count == INT64_MAX ? INT64_MAX : whole.count / 16 + 1;
  Search part{whole.passes, sample, n, count, whole.mass / 16, whole.sums};
  part.bisect(4);
  return std::max(part.enough, 1u);
}

// Keeps the likeliest `count`, or as many as weigh `mass` (the one that reaches it is kept); ties go to lower ids.
// The threshold is narrowed until few candidates lie between too few and enough; those are sorted.
Cut find_cut(const SamplePasses& passes, const float* p, int64_t n, int64_t count, double mass, SamplingScratch& s) {
  constexpr int64_t kFew = 1024, kLarge = 16384;
  Search search{passes, p, n, count, mass, s.cut_sums};
  if (n >= kLarge) search.bracket(guess_threshold(search, reinterpret_cast<float*>(s.kept)));
  search.bisect(kFew);
  const auto [enough, too_few, n_above] = std::tuple(search.enough, search.too_few, search.n_above);
  double mass_above = search.mass_above;
  const int64_t found = passes.collect(p, n, from_bits(enough), from_bits(too_few), s.kept);
  if (too_few - enough > 1)  // else all are equal, and in the order of their ids already
    std::sort(s.kept, s.kept + found, [&](int32_t x, int32_t y) { return p[x] > p[y] || (p[x] == p[y] && x < y); });
  Cut cut{from_bits(too_few), -1};
  for (int64_t i = 0; i < found && n_above + i < count && mass_above < mass; ++i) {
    cut = {p[s.kept[i]], s.kept[i]};
    mass_above += cut.p;
  }
  return cut;
}

// Sets to 0 what min_p, top_k, then top_p leave out; s.sums follows.
void filter(const SamplePasses& passes, const SamplingRow& row, int64_t n, SamplingScratch& s) {
  if (row.min_p > 0) passes.cut(s.p, n, row.min_p, n, s.sums);
  if (row.top_k > 0 && row.top_k < n) {
    const Cut cut = find_cut(passes, s.p, n, row.top_k, HUGE_VAL, s);
    passes.cut(s.p, n, cut.p, cut.id, s.sums);
  }
  if (row.top_p < 1.0f) {
    const Cut cut = find_cut(passes, s.p, n, INT64_MAX, total(s.sums, n) * static_cast<double>(row.top_p), s);
    passes.cut(s.p, n, cut.p, cut.id, s.sums);
  }
}

// The token in whose share of [0, 1) u falls, ids ascending; whole blocks are passed over by their sums.
int32_t draw(const SamplingScratch& s, int64_t n, double u) {
  const double target = u * total(s.sums, n);
  double reached = 0;
  int64_t b = 0;
  for (; (b + 1) * kSampleBlock < n && reached + s.sums[b] <= target; ++b) reached += s.sums[b];
  int64_t last = -1;  // sums are rounded: where a block runs out, the last token with a share is it
  for (; last < 0; --b) {
    const int64_t end = std::min((b + 1) * kSampleBlock, n);
    for (int64_t i = b * kSampleBlock; i < end; ++i) {
      if (s.p[i] > 0) last = i;
      reached += s.p[i];
      if (reached > target && s.p[i] > 0) return static_cast<int32_t>(i);
    }
  }
  return static_cast<int32_t>(last);
}

// m: the largest of the logits
int32_t choose(const SamplePasses& passes, float* logits, int64_t n, float m, const SamplingRow& row, SamplingScratch& s) {
  if (row.temperature < kGreedyBelow || row.top_k == 1) return static_cast<int32_t>(passes.find(logits, n, m));
  passes.exp(logits, n, m, 1.0f / row.temperature, s.p, s.sums);
  filter(passes, row, n, s);
  return draw(s, n, uniform(row.seed, static_cast<uint32_t>(row.choice), static_cast<uint32_t>(row.position)));
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
  Sampled out{choose(passes, logits, n, adjusted.changed() ? passes.max(logits, n) : m, row, scratch), 0.0f, 0};
  if (row.n_top >= 0) {
    adjusted.restore();
    out.logprob = logits[out.token] - m - log_sum;
    out.rank = static_cast<int32_t>(passes.rank(logits, n, logits[out.token])) + 1;
  }
  return out;
}

}  // namespace millrace
