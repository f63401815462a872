// Sixteen lanes on AVX2 with FMA and F16C: two registers each. The contract is in lanes/scalar.hpp.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace millrace::MILLRACE_ISA {

// Of 16 registers 12 hold sums: 3 rows x 4, or with one line at a time 6 x 2, whose weights are unpacked for twice as many
// rows. Bytes need more for themselves.
constexpr int kTileRows = 3, kNibbleRows = 6, kByteRows = 4, kPairRows = 3;
constexpr int kLines = 1;
constexpr int kRowsApart = 0;

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};

inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F load(const float* p, int n) {
  alignas(32) float t[16] = {};
  for (int i = 0; i < n; ++i) t[i] = p[i];
  return load(t);
}
inline void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline void store(float* p, F x, int n) {
  alignas(32) float t[16];
  store(t, x);
  for (int i = 0; i < n; ++i) p[i] = t[i];
}
inline F splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F operator+(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F operator-(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F operator*(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F operator/(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F unless_nan(F x, F y) {
  return {_mm256_blendv_ps(x.a, y.a, _mm256_cmp_ps(y.a, y.a, _CMP_UNORD_Q)),
          _mm256_blendv_ps(x.b, y.b, _mm256_cmp_ps(y.b, y.b, _CMP_UNORD_Q))};
}
inline F sqrt(F x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
inline F abs(F x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline F fraction(F x) { return {_mm256_sub_ps(x.a, _mm256_floor_ps(x.a)), _mm256_sub_ps(x.b, _mm256_floor_ps(x.b))}; }
inline F times_power(F x, F n) {
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256i lo = _mm256_add_epi32(_mm256_cvttps_epi32(_mm256_floor_ps(n.a)), bias);
  const __m256i hi = _mm256_add_epi32(_mm256_cvttps_epi32(_mm256_floor_ps(n.b)), bias);
  return {_mm256_mul_ps(x.a, _mm256_castsi256_ps(_mm256_slli_epi32(lo, 23))),
          _mm256_mul_ps(x.b, _mm256_castsi256_ps(_mm256_slli_epi32(hi, 23)))};
}
inline F first(F x, int n, F other) {
  const __m256i i = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256 lo = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), i));
  const __m256 hi = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), i));
  return {_mm256_blendv_ps(other.a, x.a, lo), _mm256_blendv_ps(other.b, x.b, hi)};
}
template <int D>
inline F exchanged(F x) {
  if constexpr (D == 1) return {_mm256_permute_ps(x.a, 0xb1), _mm256_permute_ps(x.b, 0xb1)};
  if constexpr (D == 2) return {_mm256_permute_ps(x.a, 0x4e), _mm256_permute_ps(x.b, 0x4e)};
  if constexpr (D == 4) return {_mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1)};
  if constexpr (D == 8) return {x.b, x.a};
}
inline F if_less(F x, F y, F then, F other) {
  return {_mm256_blendv_ps(other.a, then.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(other.b, then.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
inline uint32_t mask_greater_equal(F x, F y) {
  const uint32_t lo = static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ)));
  const uint32_t hi = static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ)));
  return lo | hi << 8;
}
inline F only(uint32_t mask, F x) {
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i lo = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(mask)), bits);
  const __m256i hi = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(mask >> 8)), bits);
  return {_mm256_and_ps(x.a, _mm256_castsi256_ps(_mm256_cmpeq_epi32(lo, bits))),
          _mm256_and_ps(x.b, _mm256_castsi256_ps(_mm256_cmpeq_epi32(hi, bits)))};
}
inline int append(uint32_t mask, int64_t base, int32_t* out) {
  int n = 0;
  for (; mask; mask &= mask - 1) out[n++] = static_cast<int32_t>(base + __builtin_ctz(mask));
  return n;
}

inline I load_i(const void* p) {
  const auto* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline void store_i(void* p, I x) {
  auto* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, x.a);
  _mm256_storeu_si256(q + 1, x.b);
}
inline I splat_i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I splat_bytes(const void* p) {
  int32_t x;
  __builtin_memcpy(&x, p, 4);
  return splat_i(x);
}
inline I operator+(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I operator-(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline I operator&(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline I shift_left(I x, int n) { return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)}; }
inline I shift_right(I x, int n) { return {_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)}; }
inline I round(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline F as_float(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline I as_int(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }

inline I if_nan(F x, I then, I other) {
  const auto choose = [](__m256 v, __m256i t, __m256i o) {
    return _mm256_blendv_epi8(o, t, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
  };
  return {choose(x.a, then.a, other.a), choose(x.b, then.b, other.b)};
}

inline float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
inline F load_half(const uint16_t* p) {
  const auto* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
inline void store_u16(uint16_t* p, I x) {
  alignas(32) int32_t t[16];
  store_i(t, x);
  for (int i = 0; i < 16; ++i) p[i] = static_cast<uint16_t>(t[i]);
}
inline void store_u16_apart(uint16_t* p, I a, int n) {  // to every other: what lies between belongs to somebody else
  uint16_t bits[16];
  store_u16(bits, a);
  for (int i = 0; i < n; ++i) p[2 * i] = bits[i];
}
inline I load_i8(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}
inline void store_i8(int8_t* p, I x) {
  alignas(32) int32_t t[16];
  store_i(t, x);
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(t[i]);
}

// The high byte of a bfloat16 follows from a code's upper four bits, the low one from its lower four. Where those of the
// exponent are 0 but for the last, both follow from the lower four: saturated so that others find nothing in the tables.
inline I load_e4m3(const uint8_t* p) {
  const auto both = [](__m128i half) { return _mm256_broadcastsi128_si256(half); };
  const __m256i normal_high = both(_mm_setr_epi8(0, 61, 62, 63, 64, 65, 66, 67, -128, -67, -66, -65, -64, -63, -62, -61));
  const __m256i small_high = both(_mm_setr_epi8(0, 59, 59, 59, 60, 60, 60, 60, 60, 60, 60, 60, 60, 60, 60, 60));
  const __m256i small_low = both(_mm_setr_epi8(0, 0x10, -0x60, -0x10, 0x40, 0x70, 0x20, 0x10, 0, 0, 0, 0, 0, 0, 0, 0));
  const __m256i nibble = _mm256_set1_epi8(15);
  const __m256i code = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i small = _mm256_add_epi8(_mm256_and_si256(code, _mm256_set1_epi8(0x7f)), _mm256_set1_epi8(0x70));
  const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(code, 4), nibble);
  const __m256i lower = _mm256_andnot_si256(nibble, _mm256_slli_epi16(code, 4));
  const __m256i high = _mm256_or_si256(_mm256_shuffle_epi8(normal_high, upper), _mm256_shuffle_epi8(small_high, small));
  const __m256i low = _mm256_xor_si256(lower, _mm256_shuffle_epi8(small_low, small));
  return {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
}

// Halves of registers are unpacked by themselves: lanes 4 to 7 have changed places with 8 to 11.
inline F in_order(F x) { return {_mm256_permute2f128_ps(x.a, x.b, 0x20), _mm256_permute2f128_ps(x.a, x.b, 0x31)}; }

// As vdpbf16ps does it: the odd product first, then the even one, each rounded.
inline F dot2(F acc, I w, I x) {
  const I high = splat_i(static_cast<int32_t>(0xffff0000u));
  acc = fma(as_float(w & high), as_float(x & high), acc);
  return fma(as_float(shift_left(w, 16)), as_float(shift_left(x, 16)), acc);
}

// vpmaddubsw saturates at 16 bits, which 8-bit codes can reach: so the high and the low nibbles go separately, exactly.
inline __m256i dot4_half(__m256i acc, __m256i w, __m256i x) {
  const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  const __m256i low = _mm256_maddubs_epi16(_mm256_and_si256(w, nibble), x);
  const __m256i high = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(w, 4), nibble), x);
  acc = _mm256_add_epi32(acc, _mm256_madd_epi16(low, ones));
  return _mm256_add_epi32(acc, _mm256_slli_epi32(_mm256_madd_epi16(high, ones), 4));
}
inline I dot4(I acc, I w, I x) { return {dot4_half(acc.a, w.a, x.a), dot4_half(acc.b, w.b, x.b)}; }

// The additions of the hot loops, which GCC 12 would gather into trees: those keep their sums in memory (docs/log.md).
inline void add_words(__m256i& sums, __m256i x) { asm("vpaddw %1, %0, %0" : "+x"(sums) : "x"(x)); }
inline void add_ints(__m256i& sums, __m256i x) { asm("vpaddd %1, %0, %0" : "+x"(sums) : "x"(x)); }

// Codes of activations are -127 to 127 (convert), never -128, whose sign could not be changed.
// vpmaddubsw does not saturate where the magnitudes of both are at most 128 and 127: 2 * 128 * 127 < 2^15.
inline __m256i dot4_byte_half(__m256i acc, __m256i w, __m256i x) {
  const __m256i code = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(x, code));
  add_ints(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  return acc;
}
constexpr int32_t kByteZero = 0;
inline I dot4_byte(I acc, I w, I x) { return {dot4_byte_half(acc.a, w.a, x.a), dot4_byte_half(acc.b, w.b, x.b)}; }

// Eight sums of two products fit into 16 bits: 8 * 2 * 15 * 127 < 2^15.
constexpr int64_t kNibbleSums = 8;
inline I dot4_nibble(I sums, I w, I x) {
  add_words(sums.a, _mm256_maddubs_epi16(w.a, x.a));
  add_words(sums.b, _mm256_maddubs_epi16(w.b, x.b));
  return sums;
}
inline I add_nibbles(I acc, I sums) {
  const __m256i ones = _mm256_set1_epi16(1);
  return acc + I{_mm256_madd_epi16(sums.a, ones), _mm256_madd_epi16(sums.b, ones)};
}

// Codes of 16 bits times lines of bytes (lanes/words.hpp), two products of words at a time: the even bytes of a lane, then
// the odd ones. Four rows of two registers, a line's even and odd words and the row's: 14 registers.
enum class Bytes { biased, plain };
constexpr int kWordRows = 4, kWordLines = 1;
template <Bytes>
inline void store_words(void* first, void* second, I codes) {
  const __m256i in_order = _mm256_permute4x64_epi64(_mm256_packs_epi32(codes.a, codes.b), 0xd8);
  const __m256i halves = _mm256_shuffle_epi8(  // of each four: 0, 2, 1, 3
      in_order, _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15)));
  const __m256i apart = _mm256_permute4x64_epi64(halves, 0xd8);
  _mm_storeu_si128(static_cast<__m128i*>(first), _mm256_castsi256_si128(apart));
  _mm_storeu_si128(static_cast<__m128i*>(second), _mm256_extracti128_si256(apart, 1));
}
struct Words {
  I even, odd;
};
template <Bytes B>
inline Words words(I line) {
  const auto even = [](__m256i x) {
    return B == Bytes::plain ? _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8) : _mm256_and_si256(x, _mm256_set1_epi16(255));
  };
  const auto odd = [](__m256i x) { return B == Bytes::plain ? _mm256_srai_epi16(x, 8) : _mm256_srli_epi16(x, 8); };
  return {{even(line.a), even(line.b)}, {odd(line.a), odd(line.b)}};
}
using WordSums = I;
inline WordSums no_words() { return splat_i(0); }
template <Bytes>
inline void add_words(WordSums& sums, Words line, const void* first, const void* second) {
  const __m256i even = splat_bytes(first).a, odd = splat_bytes(second).a;
  add_ints(sums.a, _mm256_madd_epi16(line.even.a, even));
  add_ints(sums.b, _mm256_madd_epi16(line.even.b, even));
  add_ints(sums.a, _mm256_madd_epi16(line.odd.a, odd));
  add_ints(sums.b, _mm256_madd_epi16(line.odd.b, odd));
}
inline I total(WordSums sums) { return sums; }

inline float sum(F x) {
  const __m256 h = _mm256_add_ps(x.a, x.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
inline int32_t sum_i(I x) {
  const __m256i h = _mm256_add_epi32(x.a, x.b);
  __m128i q = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}
inline float largest(F x) {
  const __m256 h = _mm256_max_ps(x.a, x.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

}  // namespace millrace::MILLRACE_ISA
