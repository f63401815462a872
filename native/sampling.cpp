#include "logits_row.hpp"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <optional>

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

// What a token is drawn from: all logits of a row or, in their order, those of the tokens that its mask allows. Minus
// infinity for the others would mean the same, but it is what a failed row has, and takes as long as a whole vocabulary.
class Candidates {
 public:
  // mask: a bit for each token; null: all
  Candidates(const float* logits, int64_t vocab, const uint32_t* mask, SamplingScratch& s)
      : logits_(logits), ids_(mask ? s.allowed : nullptr), gathered_(s.gathered), n_(mask ? list(mask, vocab) : vocab) {
    gather();
  }

  // Again, where the logits have changed.
  void gather() {
    for (int64_t i = 0; ids_ && i < n_; ++i) gathered_[i] = logits_[ids_[i]];
  }

  int64_t n() const { return n_; }
  const float* x() const { return ids_ ? gathered_ : logits_; }
  int32_t id(int32_t at) const { return ids_ ? ids_[at] : at; }

 private:
  int64_t list(const uint32_t* mask, int64_t vocab) {
    int64_t n = 0;
    for (int64_t from = 0; from < vocab; from += 32) {
      uint32_t bits = mask[from / 32];
      if (vocab - from < 32) bits &= (1u << (vocab - from)) - 1;
      for (; bits; bits &= bits - 1) ids_[n++] = static_cast<int32_t>(from) + std::countr_zero(bits);
    }
    return n;
  }

  const float* logits_;
  int32_t* ids_;  // null: every token is its own place
  float* gathered_;
  int64_t n_;
};

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

// The weakest of the kept: what is above `x` is kept, and of the logits equal to it the ids up to `id`.
struct Cut {
  float x;
  int64_t id;
  // 0 or 1, to multiply with: it could not be foretold as a branch.
  float keeps(float logit, int64_t i) const { return static_cast<float>((logit > x) | ((logit == x) & (i <= id))); }
};

// What is kept of a row: whatever `cut` keeps. Of each block `sums` holds what that weighs beside the listed tokens; null:
// all that is kept is listed.
struct Kept {
  Cut cut;
  const float* sums;
};

// What is known of a row already.
enum class Seen { nothing, maxima, weights };

// What min_p, then top_k, then top_p leave of a row whose maxima are known where one of the first two is asked for.
class Filters {
 public:
  Filters(Row& row, const SamplingRow& wanted) : row_(row), s_(row.s), wanted_(wanted) {}

  // Nothing where a logit is not finite.
  std::optional<Kept> kept(Seen seen) {
    if (wanted_.min_p > 0) base_ = row_.logit_of(wanted_.min_p);
    if (wanted_.top_k > 0 && wanted_.top_k < row_.n) return likeliest();
    return wanted_.top_p < 1.0f ? heaviest() : from_base(seen);
  }

 private:
  // top_k, and top_p of what that leaves.
  Kept likeliest() {
    const float floor = std::max(base_, row_.floor_of(wanted_.top_k));
    row_.list(floor);
    const Cut cut = find_cut(floor, next_above(row_.m), wanted_.top_k, HUGE_VAL);
    if (!(wanted_.top_p < 1.0f)) return {cut, nullptr};
    double mass = 0;
    for (int64_t i = 0; i < row_.listed; ++i) mass += s_.p[i] *= cut.keeps(s_.x[i], s_.ids[i]);
    return {find_cut(cut.x, next_above(row_.m), INT64_MAX, mass * static_cast<double>(wanted_.top_p)), nullptr};
  }

  // Neither: all that min_p leaves.
  std::optional<Kept> from_base(Seen seen) {
    if (base_ > -HUGE_VALF) {
      const Band band{base_, HUGE_VALF, HUGE_VALF};
      row_.weigh(&band);
    } else if (seen != Seen::weights && !row_.weigh(nullptr)) {
      return {};
    }
    row_.listed = 0;
    return Kept{{base_, row_.n}, s_.all_sums};
  }

  // top_p of the whole row. A pass weighs it, which says how much is to be kept; the cut then lies where a sample had it
  // and was listed in that pass, or among the few likeliest, or in what is listed from a floor that is surely low enough.
  std::optional<Kept> heaviest() {
    const std::optional<Band> guessed = guess();
    const Band whole{base_, HUGE_VALF, HUGE_VALF};
    if (!row_.weigh(guessed ? &*guessed : base_ > -HUGE_VALF ? &whole : nullptr)) return {};
    const double all = total(s_.all_sums, row_.n), mass = all * static_cast<double>(wanted_.top_p);
    const double rest = mass - (guessed ? total(s_.sums, row_.n) : 0);  // what lies above the guess is kept
    if (guessed && rest > 0 && row_.listed_mass >= rest)
      return Kept{find_cut(guessed->floor, guessed->ceiling, INT64_MAX, rest), s_.sums};
    if (const std::optional<Kept> few = among_likeliest(mass)) return few;
    return above_the_rest(mass, all - mass, guessed && rest <= 0 ? guessed->ceiling : -HUGE_VALF);
  }

  // The thresholds between which top_p's cut probably lies: where the tail of a sample of the row, every 16th vector,
  // weighs 2.5 standard errors more or less than it should. Nothing where so few outweigh the others that the sample may
  // miss them.
  std::optional<Band> guess() const {
    int64_t n = 0;
    for (int64_t i = 0; i + 16 <= row_.n; i += 256, n += 16) std::memcpy(s_.x + n, row_.x + i, 64);
    if (n < 1024) return {};
    const SamplePasses& passes = row_.passes;
    const float m = passes.look(s_.x, n, s_.most);
    if (!std::isfinite(m)) return {};
    passes.exp2(s_.x, n, m, row_.scale, s_.p, s_.cut_sums);
    double whole;
    passes.mass(s_.x, s_.p, n, base_, whole);
    if (whole < 16) return {};
    const double top_p = wanted_.top_p, tail = (1 - top_p) * whole;
    const double margin = std::min(0.5 * tail, 2.5 * std::sqrt(top_p * (1 - top_p) / static_cast<double>(n)) * whole);
    const auto least = static_cast<float>(m + natural_log(0.5 * tail / static_cast<double>(n)) * row_.temperature);
    Search floor{.passes = passes, .x = s_.x, .p = s_.p, .n = n, .count = INT64_MAX, .mass = whole - tail + margin,
                 .enough = std::max(base_, least), .too_few = next_above(m)};
    floor.mass_enough = whole;
    floor.narrow(n / 128);
    // the row is as dense above the floor as around it
    const double density = (floor.mass_enough - floor.mass_above) / (floor.too_few - floor.enough);
    return Band{base_, floor.enough, std::max(floor.too_few, static_cast<float>(floor.enough + 2 * margin / density))};
  }

  // Where the 256 likeliest, or as many more as come with them, weigh `mass`.
  std::optional<Kept> among_likeliest(double mass) {
    const float floor = std::max(base_, row_.floor_of(std::min(int64_t{256}, row_.n)));
    row_.list(floor);
    if (row_.listed_mass < mass) return {};
    return Kept{find_cut(floor, next_above(row_.m), INT64_MAX, mass), nullptr};
  }

  // From a floor below which lies no more than the `rest` that top_p leaves out, even if every token lay just below it;
  // the cut is at least `lowest`, too.
  Kept above_the_rest(double mass, double rest, float lowest) {
    const float certain = std::max(base_, row_.logit_of(0.999 * rest / static_cast<double>(row_.n)));
    const Band band{base_, std::max(lowest, certain), HUGE_VALF};
    row_.weigh(&band);
    return {find_cut(band.floor, next_above(row_.m), INT64_MAX, mass), s_.sums};
  }

  // Of the listed, which are all in [floor, ceiling), the likeliest `count`, or as many as weigh `mass` (the one that
  // reaches it is kept); ties go to lower ids. A threshold is narrowed until little lies around it; that is sorted.
  Cut find_cut(float floor, float ceiling, int64_t count, double mass) {
    Search search{.passes = row_.passes, .x = s_.x, .p = mass < HUGE_VAL ? s_.p : nullptr, .n = row_.listed,
                  .count = count, .mass = mass, .enough = floor, .too_few = ceiling};
    const bool differ = search.narrow(64);
    const int64_t n = row_.passes.collect(s_.x, 0, row_.listed, search.enough, search.too_few, s_.order);
    if (differ) std::sort(s_.order, s_.order + n, Better{s_.x});
    Cut cut{search.too_few, INT64_MAX};  // what lies above is kept, whatever is added to it
    for (int64_t i = 0; i < n && search.n_above + i < count && search.mass_above < mass; ++i) {
      cut = {s_.x[s_.order[i]], s_.ids[s_.order[i]]};
      search.mass_above += s_.p[s_.order[i]];
    }
    return cut;
  }

  Row& row_;
  SamplingScratch& s_;
  const SamplingRow& wanted_;
  float base_ = -HUGE_VALF;  // what lies below is dropped
};

// The token in whose share of [0, 1) u falls, ids ascending: of those that are listed.
int32_t token_of_list(const Row& row, const Cut& cut, double u) {
  const SamplingScratch& s = row.s;
  double kept = 0, reached = 0;
  for (int64_t i = 0; i < row.listed; ++i) kept += s.p[i] * cut.keeps(s.x[i], s.ids[i]);
  int32_t last = -1;
  for (int64_t i = 0; i < row.listed && (last < 0 || reached <= u * kept); ++i) {
    const float p = s.p[i] * cut.keeps(s.x[i], s.ids[i]);
    if (p == 0) continue;
    reached += p;
    last = s.ids[i];
  }
  return last;
}

// The same of the whole row. Blocks are passed over by their sums, with what is listed of them and kept.
int32_t token_of_row(const Row& row, const float* sums, const Cut& cut, double u) {
  const SamplePasses& passes = row.passes;
  const SamplingScratch& s = row.s;
  const int64_t ties = passes.collect(s.x, 0, row.listed, cut.x, next_above(cut.x), s.order);
  for (int64_t i = 0; i < ties; ++i) s.p[s.order[i]] *= cut.keeps(cut.x, s.ids[s.order[i]]);
  double kept;
  passes.mass(s.x, s.p, row.listed, cut.x, kept);
  const double target = u * (total(sums, row.n) + kept);
  double reached = 0;
  int64_t b = 0;
  for (int64_t begin = 0, end = 0; (b + 1) * kSampleBlock < row.n; ++b, begin = end) {
    while (end < row.listed && s.ids[end] < (b + 1) * kSampleBlock) ++end;
    passes.mass(s.x + begin, s.p + begin, end - begin, cut.x, kept);
    if (reached + sums[b] + kept > target) break;
    reached += sums[b] + kept;
  }
  int64_t last = -1;  // sums are rounded: where a block runs out, the last token that is kept is it
  for (; last < 0 && b >= 0; --b) {
    const int64_t from = b * kSampleBlock, count = std::min(kSampleBlock, row.n - from);
    const float* x = row.x + from;
    passes.exp2(x, count, row.m, row.scale, s.p, s.cut_sums);
    for (int64_t i = 0; i < count; ++i) {
      const float p = s.p[i] * cut.keeps(x[i], from + i);
      if (p > 0) last = from + i;
      reached += p;
      if (reached > target) return static_cast<int32_t>(last);
    }
  }
  return static_cast<int32_t>(last);
}

// u in [0, 1) chooses; the place in the row. kNotFinite where a logit is not finite.
int32_t draw(Row& row, const SamplingRow& wanted, Seen seen, double u) {
  const bool greedy = wanted.temperature < kGreedyBelow || wanted.top_k == 1;
  const bool by_maxima = greedy || (wanted.top_k > 0 && wanted.top_k < row.n) || wanted.min_p > 0;
  if (by_maxima && seen == Seen::nothing && !row.look()) return kNotFinite;
  if (greedy) return row.first_largest();
  const std::optional<Kept> kept = Filters(row, wanted).kept(seen);
  if (!kept) return kNotFinite;
  return kept->sums ? token_of_row(row, kept->sums, kept->cut, u) : token_of_list(row, kept->cut, u);
}

}  // namespace

// Log probabilities are of the raw logits of what the mask allows (as in vLLM), whatever else is done before the draw.
Sampled sample(const SamplePasses& passes, float* logits, int64_t n, const SamplingRow& wanted, const SamplingInputs& in,
               SamplingScratch& scratch, int32_t* top_ids, float* top_logprobs) {
  const uint32_t* mask = wanted.mask ? in.masks + (wanted.mask - 1) * ((n + 31) / 32) : nullptr;
  if (mask && !std::isfinite(passes.look(logits, n, scratch.most))) return {kNotFinite, 0.0f, 0};  // hidden ones, too
  Candidates allowed(logits, n, mask, scratch);
  if (allowed.n() == 0) return {kNothingAllowed, 0.0f, 0};
  const bool log_probabilities = wanted.n_top >= 0;
  Row raw(passes, allowed.x(), allowed.n(), 1.0f, scratch);
  Row row(passes, allowed.x(), allowed.n(), wanted.temperature, scratch);
  float log_sum = 0;
  if (log_probabilities) {
    if (!raw.weigh(nullptr)) return {kNotFinite, 0.0f, 0};
    log_sum = static_cast<float>(natural_log(total(scratch.all_sums, raw.n)));
    const int n_top = static_cast<int>(std::min<int64_t>(wanted.n_top, raw.n));
    if (n_top > 0) list_top(raw, n_top, top_ids, top_logprobs);
    for (int i = 0; i < n_top; ++i) {
      top_ids[i] = allowed.id(top_ids[i]);
      top_logprobs[i] = top_logprobs[i] - raw.m - log_sum;
    }
    std::fill(top_ids + n_top, top_ids + wanted.n_top, -1);
  }
  Sampled out{wanted.target, 0.0f, 0};
  if (wanted.target < 0) {
    Adjusted adjusted(logits, wanted, in, scratch);
    const bool changed = adjusted.changed();
    if (changed) allowed.gather();
    Seen seen = Seen::nothing;
    if (log_probabilities && !changed) seen = wanted.temperature == 1.0f ? Seen::weights : Seen::maxima;
    row.m = raw.m;
    const double u = uniform(wanted.seed, static_cast<uint32_t>(wanted.choice), static_cast<uint32_t>(wanted.position));
    out.token = draw(row, wanted, seen, u);
    if (out.token >= 0) out.token = allowed.id(out.token);
    adjusted.restore();
    if (changed) allowed.gather();
  }
  if (log_probabilities && out.token >= 0) {
    out.logprob = logits[out.token] - raw.m - log_sum;
    out.rank = static_cast<int32_t>(passes.rank(raw.x, raw.n, logits[out.token])) + 1;
  }
  return out;
}

}  // namespace millrace
