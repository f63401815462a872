// A span's scores to the weights of its values.
#pragma once
#include "parts.hpp"

namespace millrace::MILLRACE_ISA {

// Scores of a row to p = exp(score - m), with their maximum m and their sum l; SCALED: they are multiplied by `scale`
// already. keep(i, p, begin, end) stores sixteen, of which those from begin to end are the row's own, and gives what l
// sums; all others are given weight 0.
template <bool SCALED, class Keep>
[[gnu::always_inline]] inline void soften(const float* scores, Own own, int span, float scale, float& m, float& l, Keep keep) {
  const int low = own.begin / 16 * 16, lead = own.begin - low, whole = own.end / 16 * 16, rest = own.end - whole;
  const int lead_end = own.end - low < 16 ? own.end - low : 16;  // of the vector that begins before its first key
  const F never = splat(-__builtin_inff());
  F most = never;
  const auto scaled = [&](int i) { return SCALED ? load(scores + i) : load(scores + i) * splat(scale); };
  int i = low;
  if (lead) {
    most = among(scaled(i), lead, lead_end, never);
    i += 16;
  }
  for (; i < whole; i += 16) most = max(scaled(i), most);
  if (i < own.end) most = max(first(scaled(i), rest, never), most);
  m = largest(most);
  F total = zero();
  const auto exponent = [&](int i) { return (scaled(i) - splat(m)) * splat(1.44269504f); };
  for (i = 0; i < low; i += 16) keep(i, zero(), 0, 0);
  if (lead) {
    total = keep(i, among(exp2_to_zero(exponent(i)), lead, lead_end, zero()), lead, lead_end);
    i += 16;
  }
  for (; i + 32 <= whole; i += 32) {
    F p[2] = {exponent(i), exponent(i + 16)};
    exp2_to_zero(p);
    total = total + keep(i, p[0], 0, 16);
    total = total + keep(i + 16, p[1], 0, 16);
  }
  if (i < whole) {
    total = total + keep(i, exp2_to_zero(exponent(i)), 0, 16);
    i += 16;
  }
  if (i < own.end) {
    total = total + keep(i, first(exp2_to_zero(exponent(i)), rest, zero()), 0, rest);
    i += 16;
  }
  for (; i < span; i += 16) keep(i, zero(), 0, 0);
  l = sum(total);
}

// In place; bfloat16: p is rounded, summed as rounded, and lies as pairs over the floats it came from.
template <bool BF16, bool SCALED = true>
void soften_floats(float* scores, Own own, int span, float scale, float& m, float& l) {
  soften<SCALED>(scores, own, span, scale, m, l, [&] [[gnu::always_inline]] (int i, F p, int, int) {
    if constexpr (BF16) {
      const I bits = to_bf16(p);
      store_u16(reinterpret_cast<uint16_t*>(scores) + i, bits);
      return as_float(shift_left(bits, 16));
    } else {
      store(scores + i, p);
      return p;
    }
  });
}

}  // namespace millrace::MILLRACE_ISA
