// exp, sigmoid and tanh on 16 lanes, from the same few operations on every instruction set, so with the same bits.
#pragma once
#include <cstdint>

namespace millrace::MILLRACE_ISA {

inline F power_of_two(I n) { return as_float(shift_left(n + splat_i(127), 23)); }  // -126 <= n <= 127

inline F exp_polynomial(F r) {
  F p = splat(1.0f / 720);
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  return fma(p, r, splat(1.0f));
}

// e^x within 2 ulp; 0 below -87.3 (no subnormals), infinity above 88.7, NaN stays NaN.
// x = n ln2 + r with |r| <= ln2/2 (ln2 in two parts: Cody and Waite, 1980), a degree-6 polynomial in r, 2^n in two factors.
inline F exp(F x) {
  const F clamped = max(splat(-88.0f), min(splat(89.0f), x));
  const I n = round(clamped * splat(1.44269504f));
  F r = fma(to_float(n), splat(-0.693145752f), clamped);
  r = fma(to_float(n), splat(-1.42860677e-6f), r);
  const F p = exp_polynomial(r);
  const I half = shift_right(n + splat_i(256), 1) - splat_i(128);  // floor(n/2): 2^128 alone would leave the exponent
  const F scaled = p * power_of_two(half) * power_of_two(n - half);
  return if_less(x, splat(-87.3f), zero(), scaled);
}

// 2^x for x below 127, within 2 ulp; 0 where it would be subnormal. NaN stays NaN. A minimax polynomial of the fraction, 1 at
// 0 and off by 8.3e-8 at most.
// Step by step for all of x: one alone waits for its own products more than it computes.
template <int N>
[[gnu::always_inline]] inline void exp2_to_zero(F (&x)[N]) {
  constexpr float kPolynomial[] = {0x1.277854p-7f, 0x1.c91ce6p-5f, 0x1.ebdb56p-3f, 0x1.62e4bap-1f, 1.0f};
  F t[N], p[N];
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) t[i] = max(splat(-127.0f), x[i]);
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) x[i] = fraction(t[i]);
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) p[i] = splat(0x1.e974fcp-10f);
#pragma GCC unroll 8
  for (const float c : kPolynomial)
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) p[i] = fma(p[i], x[i], splat(c));
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) x[i] = times_power(p[i], t[i]);
}
inline F exp2_to_zero(F x) {
  F alone[1] = {x};
  exp2_to_zero(alone);
  return alone[0];
}

inline F sigmoid(F x) { return splat(1.0f) / (splat(1.0f) + exp(zero() - x)); }

// 1 - 2 / (e^2x + 1): absolute error below 1.2e-7, which is what GELU needs.
inline F tanh(F x) { return splat(1.0f) - splat(2.0f) / (exp(x + x) + splat(1.0f)); }

// Below 0.9 x P(x^2), beyond it 1 - t Q(t) e^-x^2 with t = 1 / (1 + 0.41 |x|); minimax fits, off by 2e-8 and 1e-8.
inline F erf(F x) {
  const F square = x * x, size = abs(x);
  F p = splat(-0.000588670838624239f);
  p = fma(p, square, splat(0.004973103757947683f));
  p = fma(p, square, splat(-0.026753325015306473f));
  p = fma(p, square, splat(0.11281466484069824f));
  p = fma(p, square, splat(-0.37612462043762207f));
  p = fma(p, square, splat(1.1283791065216064f));
  const F t = splat(1.0f) / fma(splat(0.41f), size, splat(1.0f));
  F q = splat(0.54354757f);
  q = fma(q, t, splat(-0.1076049f));
  q = fma(q, t, splat(0.35033213f));
  q = fma(q, t, splat(0.21465374f));
  const F far = splat(1.0f) - q * t * exp2_to_zero(square * splat(-1.44269504f));
  return if_less(size, splat(0.9f), x * p, if_less(x, zero(), zero() - far, far));
}

// float to bfloat16 bits, nearest even; NaN stays NaN, also one whose bits are all ones and would wrap to 0.
inline I to_bf16(F x) {
  const I bits = as_int(x), upper = shift_right(bits, 16);
  const I rounded = shift_right(bits + (upper & splat_i(1)) + splat_i(0x7fff), 16);
  return if_nan(x, (upper & splat_i(0x8000)) + splat_i(0x7fc0), rounded);
}

// The first n of sixteen, rounded.
inline void store_bf16(uint16_t* y, F x, int n) {
  if (n == 16) return store_u16(y, to_bf16(x));
  uint16_t bits[16];
  store_u16(bits, to_bf16(x));
  __builtin_memcpy(y, bits, 2 * n);
}

}  // namespace millrace::MILLRACE_ISA
