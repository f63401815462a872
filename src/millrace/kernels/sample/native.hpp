// The vector passes of sampling over one row of n logits; native/sampling.cpp holds the logic.
#pragma once
namespace millrace::MILLRACE_ISA {

// 16 elements, or the `count` that are left.
inline F load_some(const float* x, int count) { return count == 16 ? load(x) : load(x, count); }

// The largest logit; NaN where any logit is not finite.
inline float row_max(const float* x, int64_t n) {
  F most = splat(-__builtin_inff()), check = zero();
  for (int64_t i = 0; i < n; i += 16) {
    const int count = n - i < 16 ? static_cast<int>(n - i) : 16;
    const F v = load_some(x + i, count);
    check = fma(v, zero(), check);  // infinity * 0 is NaN
    most = max(first(v, count, most), most);
  }
  return largest(most) + sum(check);
}

// p[i] = exp((x[i] - m) * scale); the sum of each block of 4096 into sums (16 lanes, then the fixed tree). p may be null.
inline void row_exp(const float* x, int64_t n, float m, float scale, float* p, float* sums) {
  for (int64_t from = 0; from < n; from += kSampleBlock) {
    const int64_t to = from + kSampleBlock < n ? from + kSampleBlock : n;
    F total = zero();
    for (int64_t i = from; i < to; i += 16) {
      const int count = to - i < 16 ? static_cast<int>(to - i) : 16;
      const F v = load_some(x + i, count);
      const F e = first(exp((v - splat(m)) * splat(scale)), count, zero());
      total = total + e;
      if (p) store(p + i, e, count);
    }
    sums[from / kSampleBlock] = sum(total);
  }
}

// The first index whose element is at least `value`; n where there is none.
inline int64_t row_find(const float* x, int64_t n, float value) {
  for (int64_t i = 0; i < n; i += 16) {
    const int count = n - i < 16 ? static_cast<int>(n - i) : 16;
    uint32_t mask = mask_greater_equal(load_some(x + i, count), splat(value));
    mask &= (1u << count) - 1;
    if (mask) return i + __builtin_ctz(mask);
  }
  return n;
}

// Indices, ascending, of the elements from `floor` up to below `ceiling`.
inline int64_t row_collect(const float* x, int64_t n, float floor, float ceiling, int32_t* out) {
  int64_t found = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const int count = n - i < 16 ? static_cast<int>(n - i) : 16;
    const F v = load_some(x + i, count);
    uint32_t mask = mask_greater_equal(v, splat(floor)) & ~mask_greater_equal(v, splat(ceiling));
    mask &= (1u << count) - 1;
    for (; mask; mask &= mask - 1) out[found++] = static_cast<int32_t>(i + __builtin_ctz(mask));
  }
  return found;
}

// How many elements are at least `floor` (above 0), and their sum per block, added as row_exp adds.
inline int64_t row_above(const float* p, int64_t n, float floor, float* sums) {
  int64_t found = 0;
  for (int64_t from = 0; from < n; from += kSampleBlock) {
    const int64_t to = from + kSampleBlock < n ? from + kSampleBlock : n;
    F total = zero();
    for (int64_t i = from; i < to; i += 16) {
      const int count = to - i < 16 ? static_cast<int>(to - i) : 16;
      const F v = load_some(p + i, count);
      total = total + if_less(v, splat(floor), zero(), v);
      found += __builtin_popcount(mask_greater_equal(v, splat(floor)));
    }
    sums[from / kSampleBlock] = sum(total);
  }
  return found;
}

// Sets to 0 what is below `least`, and of those equal to it the ones behind index `last`; sums as above.
inline void row_cut(float* p, int64_t n, float least, int64_t last, float* sums) {
  for (int64_t from = 0; from < n; from += kSampleBlock) {
    const int64_t to = from + kSampleBlock < n ? from + kSampleBlock : n;
    F total = zero();
    for (int64_t i = from; i < to; i += 16) {
      const int count = to - i < 16 ? static_cast<int>(to - i) : 16;
      const F v = load_some(p + i, count);
      const int64_t before = last + 1 - i;  // elements of this vector that may be equal
      const F above = if_less(splat(least), v, v, zero()), equal = if_less(v, splat(least), zero(), v);
      const F kept = first(equal, before > 16 ? 16 : before < 0 ? 0 : static_cast<int>(before), above);
      total = total + kept;
      store(p + i, kept, count);
    }
    sums[from / kSampleBlock] = sum(total);
  }
}

// How many elements are larger than `value`.
inline int64_t row_rank(const float* x, int64_t n, float value) {
  int64_t not_larger = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const int count = n - i < 16 ? static_cast<int>(n - i) : 16;
    const uint32_t mask = mask_greater_equal(splat(value), load_some(x + i, count));
    not_larger += __builtin_popcount(mask & ((1u << count) - 1));
  }
  return n - not_larger;
}

// The k largest, best first, equal ones by lower index.
inline void row_top(const float* x, int64_t n, int k, int32_t* ids, float* values) {
  int held = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const int count = n - i < 16 ? static_cast<int>(n - i) : 16;
    uint32_t mask = (1u << count) - 1;
    if (held == k) mask &= mask_greater_equal(load_some(x + i, count), splat(values[k - 1]));
    for (; mask; mask &= mask - 1) {
      const int64_t at = i + __builtin_ctz(mask);
      const float value = x[at];
      if (held == k && !(value > values[k - 1])) continue;
      int place = held < k ? held++ : k - 1;
      for (; place > 0 && value > values[place - 1]; --place) {
        values[place] = values[place - 1];
        ids[place] = ids[place - 1];
      }
      values[place] = value;
      ids[place] = static_cast<int32_t>(at);
    }
  }
}

}  // namespace millrace::MILLRACE_ISA
