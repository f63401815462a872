// The vector passes of sampling over one row of n logits; native/sampling.cpp holds the logic.
#pragma once
namespace millrace::MILLRACE_ISA {

// All sixteen lanes of a vector, or the first `count` of a row's last one; the compiler sees which.
struct AllLanes {
  F load(const float* x) const { return MILLRACE_ISA::load(x); }
  F only(F a, F) const { return a; }
  uint32_t only(uint32_t mask) const { return mask; }
};
struct SomeLanes {
  int count;
  F load(const float* x) const { return MILLRACE_ISA::load(x, count); }
  F only(F a, F other) const { return first(a, count, other); }
  uint32_t only(uint32_t mask) const { return mask & ((1u << count) - 1); }
};

template <class Body>
inline void each_vector(int64_t from, int64_t to, Body body) {
  int64_t i = from;
  for (; i + 16 <= to; i += 16) body(i, AllLanes{});
  if (i < to) body(i, SomeLanes{static_cast<int>(to - i)});
}

template <class Body>
inline void each_block(int64_t n, Body body) {
  for (int64_t from = 0; from < n; from += kSampleBlock)
    body(from / kSampleBlock, from, from + kSampleBlock < n ? from + kSampleBlock : n);
}

// The largest logit; NaN where any logit is not finite. Four chains hide the latency; the maximum has no order.
inline float row_max(const float* x, int64_t n) {
  F most[4], check[4];
  for (int k = 0; k < 4; ++k) most[k] = splat(-__builtin_inff()), check[k] = zero();
  int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    for (int k = 0; k < 4; ++k) {
      const F v = load(x + i + 16 * k);
      check[k] = fma(v, zero(), check[k]);  // infinity * 0 is NaN
      most[k] = max(v, most[k]);
    }
  each_vector(i, n, [&](int64_t at, auto lanes) {
    const F v = lanes.load(x + at);
    check[0] = fma(v, zero(), check[0]);
    most[0] = lanes.only(max(v, most[0]), most[0]);
  });
  return largest(max(max(most[0], most[1]), max(most[2], most[3]))) +
         sum((check[0] + check[1]) + (check[2] + check[3]));
}

// p[i] = exp((x[i] - m) * scale), m at least every x; the sum of each block of 1024 into sums (16 lanes, then the
// fixed tree). p may be null, or x.
inline void row_exp(const float* x, int64_t n, float m, float scale, float* p, float* sums) {
  each_block(n, [&](int64_t block, int64_t from, int64_t to) {
    F total = zero();
    each_vector(from, to, [&](int64_t i, auto lanes) {
      const F e = lanes.only(exp_to_zero((lanes.load(x + i) - splat(m)) * splat(scale)), zero());
      total = total + e;
      if (p && to - i >= 16)
        store(p + i, e);
      else if (p)
        store(p + i, e, static_cast<int>(to - i));
    });
    sums[block] = sum(total);
  });
}

// The same p, without storing it: per block the sum of all that are at least `base` and of all from `ceiling` on, and
// the indices, ascending, of those from `floor` up to below `ceiling`. Returns how many; ids takes 16 more.
inline int64_t row_weigh(const float* x, int64_t n, const Weighing& w, float* all, float* above, int32_t* ids) {
  int64_t found = 0;
  each_block(n, [&](int64_t block, int64_t from, int64_t to) {
    F total = zero(), high = zero();
    const auto weigh = [&](int64_t i, auto lanes) {
      const F p = exp_to_zero((lanes.load(x + i) - splat(w.m)) * splat(w.scale));
      const F e = lanes.only(if_less(p, splat(w.base), zero(), p), zero());
      const uint32_t from_ceiling = mask_greater_equal(e, splat(w.ceiling));
      total = total + e;
      high = high + only(from_ceiling, e);
      return mask_greater_equal(e, splat(w.floor)) & ~from_ceiling;
    };
    int64_t i = from;
    for (; i + 64 <= to; i += 64) {  // four vectors a branch: nearly all have something, or nearly none
      uint32_t mask[4];
      for (int k = 0; k < 4; ++k) mask[k] = weigh(i + 16 * k, AllLanes{});
      if (mask[0] | mask[1] | mask[2] | mask[3])
        for (int k = 0; k < 4; ++k) found += append(mask[k], i + 16 * k, ids + found);
    }
    each_vector(i, to, [&](int64_t at, auto lanes) { found += append(weigh(at, lanes), at, ids + found); });
    all[block] = sum(total);
    above[block] = sum(high);
  });
  return found;
}

// The first index whose element is at least `value`; n where there is none.
inline int64_t row_find(const float* x, int64_t n, float value) {
  for (int64_t i = 0; i < n; i += 16) {
    const int count = n - i < 16 ? static_cast<int>(n - i) : 16;
    const uint32_t mask = mask_greater_equal(SomeLanes{count}.load(x + i), splat(value)) & ((1u << count) - 1);
    if (mask) return i + __builtin_ctz(mask);
  }
  return n;
}

// Indices, ascending, of the elements from `floor` up to below `ceiling`.
inline int64_t row_collect(const float* x, int64_t n, float floor, float ceiling, int32_t* out) {
  int64_t found = 0;
  each_vector(0, n, [&](int64_t i, auto lanes) {
    const F v = lanes.load(x + i);
    uint32_t mask = lanes.only(mask_greater_equal(v, splat(floor)) & ~mask_greater_equal(v, splat(ceiling)));
    for (; mask; mask &= mask - 1) out[found++] = static_cast<int32_t>(i + __builtin_ctz(mask));
  });
  return found;
}

// How many elements are at least `floor` (above 0), and their sum per block, added as row_exp adds.
inline int64_t row_above(const float* p, int64_t n, float floor, float* sums) {
  int64_t found = 0;
  each_block(n, [&](int64_t block, int64_t from, int64_t to) {
    F total = zero();
    each_vector(from, to, [&](int64_t i, auto lanes) {
      const F v = lanes.load(p + i);
      total = total + if_less(v, splat(floor), zero(), v);
      found += __builtin_popcount(mask_greater_equal(v, splat(floor)));
    });
    sums[block] = sum(total);
  });
  return found;
}

// How many elements are larger than `value`.
inline int64_t row_rank(const float* x, int64_t n, float value) {
  int64_t not_larger = 0;
  each_vector(0, n, [&](int64_t i, auto lanes) {
    not_larger += __builtin_popcount(lanes.only(mask_greater_equal(splat(value), lanes.load(x + i))));
  });
  return n - not_larger;
}

// The k largest, best first, equal ones by lower index.
inline void row_top(const float* x, int64_t n, int k, int32_t* ids, float* values) {
  int held = 0;
  each_vector(0, n, [&](int64_t i, auto lanes) {
    uint32_t mask = lanes.only(0xffffu);
    if (held == k) mask &= mask_greater_equal(lanes.load(x + i), splat(values[k - 1]));
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
  });
}

}  // namespace millrace::MILLRACE_ISA
