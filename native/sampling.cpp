#include "sampling.hpp"

#include <algorithm>
#include <cfloat>
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

uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// The weakest of the kept: what is above `p` is kept, and of those equal to it the ids up to `id`.
struct Cut {
  float p;
  int64_t id;
  // 0 or 1, to multiply with: it could not be foretold as a branch.
  float keeps(float weight, int64_t i) const { return static_cast<float>((weight > p) | ((weight == p) & (i <= id))); }
};

constexpr float kAboveAll = 1.0f + FLT_EPSILON;  // p is at most 1

// From `floor` up to below `ceiling`.
struct Band {
  float floor, ceiling = kAboveAll;
};

// A bisection over the bits of p for the lowest threshold with enough above it: `count` elements, or the weight `mass`.
struct Search {
  const SamplePasses& passes;
  const float* p;
  int64_t n, count;
  double mass;
  float* sums;
  uint32_t enough, too_few;           // the bits of a threshold that leaves enough, and of one that does not
  int64_t n_enough = n, n_above = 0;  // elements from each of them on
  double mass_above = 0;

  void bisect(int64_t few) {
    while (too_few - enough > 1 && n_enough - n_above > few) {
      const uint32_t bits = enough + (too_few - enough) / 2;
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
  }
};

// Of the candidates s.p keeps the likeliest `count`, or as many as weigh `mass` (the one that reaches it is kept); ties
// go to lower ids. The threshold is narrowed until little lies between too few and enough; that is sorted.
Cut find_cut(const SamplePasses& passes, Band band, int64_t n, int64_t count, double mass, SamplingScratch& s) {
  Search search{passes, s.p, n, count, mass, s.cut_sums, to_bits(band.floor), to_bits(std::min(band.ceiling, kAboveAll))};
  search.bisect(64);
  const int64_t found = passes.collect(s.p, n, from_bits(search.enough), from_bits(search.too_few), s.order);
  if (search.too_few - search.enough > 1)  // else all are equal, and in the order of their ids already
    std::sort(s.order, s.order + found, [&](int32_t x, int32_t y) { return s.p[x] > s.p[y] || (s.p[x] == s.p[y] && x < y); });
  Cut cut{from_bits(search.too_few), -1};
  for (int64_t i = 0; i < found && search.n_above + i < count && search.mass_above < mass; ++i) {
    cut = {s.p[s.order[i]], s.ids[s.order[i]]};
    search.mass_above += cut.p;
  }
  return cut;
}

// A row of logits with the weights p = exp((x - m) * scale), and what sampling leaves of it.
class Filter {
 public:
  Filter(const SamplePasses& passes, const float* x, int64_t n, float m, const SamplingRow& row, SamplingScratch& s)
      : passes_(passes), x_(x), n_(n), row_(row), s_(s), m_(m), scale_(1.0f / row.temperature),
        least_(std::max(row.min_p, FLT_MIN)) {}

  // min_p, then top_k, then top_p; s.sums is of what they keep.
  Cut operator()() {
    Cut cut{least_, n_};
    if (row_.top_k > 0 && row_.top_k < n_) {
      cut = likeliest();
      if (row_.top_p < 1.0f) cut = heaviest_of_kept(cut);
    } else if (row_.top_p < 1.0f) {
      cut = heaviest();
    } else if (row_.min_p > 0) {
      look({least_, least_});
    } else {
      passes_.exp(x_, n_, m_, scale_, nullptr, s_.sums);
    }
    for (int64_t i = 0; i < found_;) {
      const int64_t b = s_.ids[i] / kSampleBlock, end = (b + 1) * kSampleBlock;
      float kept = 0;
      for (; i < found_ && s_.ids[i] < end; ++i) kept += s_.p[i] * cut.keeps(s_.p[i], s_.ids[i]);
      s_.sums[b] += kept;
    }
    return cut;
  }

  // The token in whose share of [0, 1) u falls, ids ascending; whole blocks are passed over by their sums.
  int32_t draw(const Cut& cut, double u) {
    const double target = u * total(s_.sums, n_);
    double reached = 0;
    int64_t b = 0;
    for (; (b + 1) * kSampleBlock < n_ && reached + s_.sums[b] <= target; ++b) reached += s_.sums[b];
    int64_t last = -1;  // sums are rounded: where a block runs out, the last token that is kept is it
    for (; last < 0 && b >= 0; --b) {
      const int64_t from = b * kSampleBlock, count = std::min(kSampleBlock, n_ - from);
      passes_.exp(x_ + from, count, m_, scale_, s_.p, s_.cut_sums);
      for (int64_t i = 0; i < count; ++i) {
        const float kept = cut.keeps(s_.p[i], from + i);
        if (kept != 0) last = from + i;
        reached += s_.p[i] * kept;
        if (reached > target) return static_cast<int32_t>(last);
      }
    }
    return static_cast<int32_t>(last);
  }

 private:
  // What lies in the band becomes the candidates, what lies above it is summed.
  void look(Band band) {
    band_ = {std::max(band.floor, least_), band.ceiling};
    const Weighing w{m_, scale_, least_, band_.floor, band_.ceiling};
    found_ = passes_.weigh(x_, n_, w, s_.all_sums, s_.sums, s_.ids);
    for (int64_t i = 0; i < found_; ++i) s_.p[i] = x_[s_.ids[i]];
    passes_.exp(s_.p, found_, m_, scale_, s_.p, s_.cut_sums);
    candidates_ = total(s_.cut_sums, found_);
  }

  // Every sixteenth vector of the row stands for all of it. Empty where the row is too short for that.
  int64_t take_sample() {
    int64_t n = 0;
    if (n_ >= 16384)
      for (int64_t i = 0; i + 16 <= n_; i += 256, n += 16) std::memcpy(s_.sample + n, x_ + i, 64);
    if (n > 0) passes_.exp(s_.sample, n, m_, scale_, s_.sample, s_.cut_sums);
    return n;
  }

  Search search_sample(float floor, int64_t n, int64_t count, double mass, int64_t few) {
    Search search{passes_, s_.sample, n, count, mass, s_.cut_sums, to_bits(floor), to_bits(kAboveAll)};
    search.bisect(few);
    return search;
  }

  // All candidates of top_k are listed: those from a threshold on that keeps more than k, but not many more.
  Cut likeliest() {
    const double k = row_.top_k / 16.0;
    float floor = least_;
    if (const int64_t n = take_sample())
      floor = from_bits(search_sample(least_, n, static_cast<int64_t>(k + 4 * std::sqrt(k) + 4), HUGE_VAL, 4).enough);
    look({floor});
    if (found_ < row_.top_k && floor > least_) look({least_});
    return find_cut(passes_, band_, found_, row_.top_k, HUGE_VAL, s_);
  }

  Cut heaviest_of_kept(const Cut& cut) {
    int64_t n = 0;
    double mass = 0;
    for (int64_t i = 0; i < found_; ++i) {
      if (cut.keeps(s_.p[i], s_.ids[i]) == 0) continue;
      s_.ids[n] = s_.ids[i];
      mass += s_.p[n++] = s_.p[i];
    }
    found_ = n;
    return find_cut(passes_, band_, n, INT64_MAX, mass * static_cast<double>(row_.top_p), s_);
  }

  // What is surely kept is summed only; candidates are what lies between two thresholds guessed from the sample.
  Cut heaviest() {
    Band band{least_};
    if (const int64_t n = take_sample()) band = guess_band(n);
    look(band);
    const double all = total(s_.all_sums, n_), mass = all * static_cast<double>(row_.top_p);
    double rest = mass - total(s_.sums, n_);
    if (rest <= 0 || candidates_ < rest) {
      // Below this floor lies no more than top_p leaves out, even if every token lay just below it.
      const auto certain = static_cast<float>(0.999 * (all - mass) / static_cast<double>(n_));
      look({rest <= 0 ? std::max(band.ceiling, certain) : certain});
      rest = mass;
    }
    return find_cut(passes_, band_, found_, INT64_MAX, rest, s_);
  }

  // The thresholds between which top_p's cut probably lies: where the tail of the sample weighs 6 % more or less than it
  // should. What outweighs the whole sample may be missing in it, so its own weight of 1 is the least that is assumed.
  Band guess_band(int64_t n) {
    passes_.above(s_.sample, n, least_, s_.cut_sums);
    const double whole = total(s_.cut_sums, n), tail = (1 - static_cast<double>(row_.top_p)) * std::max(whole, 1 / 16.0);
    const int64_t few = n / 128 + 1;
    const float from = std::max(least_, static_cast<float>(0.5 * tail / static_cast<double>(n)));
    Band band{from};
    if (whole > 0.94 * tail) band.floor = from_bits(search_sample(from, n, INT64_MAX, whole - 0.94 * tail, few).enough);
    if (whole > 16)
      band.ceiling = from_bits(search_sample(band.floor, n, INT64_MAX, whole - 1.06 * tail, few).too_few);
    return band;
  }

  const SamplePasses& passes_;
  const float* x_;
  int64_t n_;
  const SamplingRow& row_;
  SamplingScratch& s_;
  float m_, scale_, least_;
  Band band_{0};
  int64_t found_ = 0;  // candidates in s.ids and s.p, all in the band,
  double candidates_ = 0;  // and their sum
};

// m: the largest of the logits
int32_t choose(const SamplePasses& passes, float* logits, int64_t n, float m, const SamplingRow& row, SamplingScratch& s) {
  if (row.temperature < kGreedyBelow || row.top_k == 1) return static_cast<int32_t>(passes.find(logits, n, m));
  Filter filter(passes, logits, n, m, row, s);
  const Cut cut = filter();
  return filter.draw(cut, uniform(row.seed, static_cast<uint32_t>(row.choice), static_cast<uint32_t>(row.position)));
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
