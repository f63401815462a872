// Walks over a row of floats, sixteen at a time, whatever its length.
#pragma once
#include <cstdint>

namespace millrace::MILLRACE_ISA {

// All sixteen lanes of a vector, or the first `count` of a row's last one; the compiler sees which.
struct AllLanes {
  F load(const float* x) const { return MILLRACE_ISA::load(x); }
  void store(float* x, F a) const { MILLRACE_ISA::store(x, a); }
  F only(F a, F) const { return a; }
  uint32_t only(uint32_t mask) const { return mask; }
};
struct SomeLanes {
  int count;
  F load(const float* x) const { return MILLRACE_ISA::load(x, count); }
  void store(float* x, F a) const { MILLRACE_ISA::store(x, a, count); }
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
inline void each_block(int64_t n, int64_t size, Body body) {
  for (int64_t from = 0; from < n; from += size) body(from / size, from, from + size < n ? from + size : n);
}

// The largest of x (n); `check` becomes NaN where an element is not finite. Four chains hide the latency, a maximum has
// no order.
inline float row_largest(const float* x, int64_t n, F& check) {
  F most[4];
  for (int k = 0; k < 4; ++k) most[k] = splat(-__builtin_inff());
  int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    for (int k = 0; k < 4; ++k) {
      const F v = load(x + i + 16 * k);
      check = fma(v, zero(), check);  // infinity * 0 is NaN
      most[k] = max(v, most[k]);
    }
  each_vector(i, n, [&](int64_t at, auto lanes) {
    const F v = lanes.load(x + at);
    check = fma(v, zero(), check);
    most[0] = lanes.only(max(v, most[0]), most[0]);
  });
  return largest(max(max(most[0], most[1]), max(most[2], most[3])));
}

// The largest magnitude of x (n); `check` as above.
inline float row_magnitude(const float* x, int64_t n, F& check) {
  F most = zero();
  each_vector(0, n, [&](int64_t i, auto lanes) {
    const F v = lanes.load(x + i);
    check = fma(v, zero(), check);
    most = max(abs(v), most);
  });
  return largest(most);
}

// How many of x (n) are at least `floor`.
inline int64_t row_count(const float* x, int64_t n, float floor) {
  int64_t found = 0;
  each_vector(0, n, [&](int64_t i, auto lanes) {
    found += __builtin_popcount(lanes.only(mask_greater_equal(lanes.load(x + i), splat(floor))));
  });
  return found;
}

// The indices from `from` up to below `to`, ascending, of what is at least `floor` and below `ceiling`; out takes 16 more.
inline int64_t row_collect(const float* x, int64_t from, int64_t to, float floor, float ceiling, int32_t* out) {
  int64_t found = 0;
  each_vector(from, to, [&](int64_t i, auto lanes) {
    const F v = lanes.load(x + i);
    const uint32_t mask = lanes.only(mask_greater_equal(v, splat(floor)) & ~mask_greater_equal(v, splat(ceiling)));
    if (mask) found += append(mask, i, out + found);
  });
  return found;
}

}  // namespace millrace::MILLRACE_ISA
