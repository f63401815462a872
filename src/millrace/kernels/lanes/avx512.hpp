// Sixteen lanes on AVX-512 with VNNI and BF16: one register each. The contract is in lanes/scalar.hpp.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace millrace::MILLRACE_ISA {

// 14 rows x 2 accumulators, 2 weight lines, a broadcast and a mask: 32 registers. Pairs that are made here take two more.
constexpr int kTileRows = 14, kNibbleRows = 14, kByteRows = 14, kPairRows = 12;
constexpr int kLines = 2;
constexpr int kRowsApart = 6;

struct F {
  __m512 v;
};
struct I {
  __m512i v;
};

inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F load(const float* p, int n) { return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p)}; }
inline void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
inline void store(float* p, F a, int n) { _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), a.v); }
inline F splat(float x) { return {_mm512_set1_ps(x)}; }
inline F zero() { return {_mm512_setzero_ps()}; }
inline F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F unless_nan(F a, F b) { return {_mm512_mask_mov_ps(a.v, _mm512_cmp_ps_mask(b.v, b.v, _CMP_UNORD_Q), b.v)}; }
inline F sqrt(F a) { return {_mm512_sqrt_ps(a.v)}; }
inline F abs(F a) { return {_mm512_abs_ps(a.v)}; }
inline F fraction(F a) {  // vreduceps would round the difference down as well
  return {_mm512_sub_ps(a.v, _mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC))};
}
inline F times_power(F a, F n) { return {_mm512_scalef_ps(a.v, n.v)}; }  // subnormal results are flushed
inline F first(F a, int n, F other) {
  return {_mm512_mask_blend_ps(static_cast<__mmask16>((1u << n) - 1), other.v, a.v)};
}
// Lane i from lane i ^ D, for D of 1, 2, 4, 8.
template <int D>
inline F exchanged(F a) {
  if constexpr (D == 1) return {_mm512_permute_ps(a.v, 0xb1)};
  if constexpr (D == 2) return {_mm512_permute_ps(a.v, 0x4e)};
  if constexpr (D == 4) return {_mm512_shuffle_f32x4(a.v, a.v, 0xb1)};
  if constexpr (D == 8) return {_mm512_shuffle_f32x4(a.v, a.v, 0x4e)};
}
inline F if_less(F a, F b, F then, F other) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), other.v, then.v)};
}
inline uint32_t mask_greater_equal(F a, F b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
inline F only(uint32_t mask, F a) { return {_mm512_maskz_mov_ps(static_cast<__mmask16>(mask), a.v)}; }
// Compressed in registers: a compressing store to memory is microcode on Zen 4.
inline int append(uint32_t mask, int64_t base, int32_t* out) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int32_t>(base)));
  _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), at));
  return __builtin_popcount(mask);
}

inline I load_i(const void* p) { return {_mm512_loadu_si512(p)}; }
inline void store_i(void* p, I a) { _mm512_storeu_si512(p, a.v); }
inline I splat_i(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I splat_bytes(const void* p) {
  I r;
  asm("vpbroadcastd %1, %0" : "=v"(r.v) : "m"(*static_cast<const int32_t*>(p)));
  return r;
}
inline I operator+(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I operator-(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline I operator&(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
inline I shift_left(I a, int n) { return {_mm512_slli_epi32(a.v, n)}; }
inline I shift_right(I a, int n) { return {_mm512_srli_epi32(a.v, n)}; }
inline I round(F a) { return {_mm512_cvtps_epi32(a.v)}; }
inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline F as_float(I a) { return {_mm512_castsi512_ps(a.v)}; }
inline I as_int(F a) { return {_mm512_castps_si512(a.v)}; }

inline I if_nan(F x, I then, I other) {
  return {_mm512_mask_mov_epi32(other.v, _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), then.v)};
}

inline float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
inline F load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store_u16(uint16_t* p, I a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v));
}
inline void store_u16_apart(uint16_t* p, I a, int n) {  // a masked store touches nothing between
  _mm512_mask_storeu_epi16(p, static_cast<__mmask32>(n == 16 ? 0x55555555u : 0x55555555u & ((1u << 2 * n) - 1)), a.v);
}
inline I load_i8(const int8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline void store_i8(int8_t* p, I a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}

// Magnitudes below 8 are subnormal in E4M3, and looked up.
inline I load_e4m3(const uint8_t* p) {
  const __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const __m512i magnitude = _mm512_and_si512(code, _mm512_set1_epi16(0x7f));
  const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(code, _mm512_set1_epi16(0x80)), 8);
  const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(0x3c00));
  const __m512i subnormals = _mm512_castsi128_si512(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
  const __mmask32 small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
  return {_mm512_or_si512(sign, _mm512_mask_permutexvar_epi16(normal, small, magnitude, subnormals))};
}

inline F in_order(F a) { return a; }

// The hot instructions, written so that the broadcast x stays in a register: GCC 12 would fold it into each of them as a
// memory operand, and Zen 5 then runs two thirds as many (docs/log.md).
inline F dot2(F acc, I w, I x) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(acc.v) : "v"(w.v), "v"(x.v));
  return acc;
}
inline I dot4(I acc, I w, I x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(w.v), "v"(x.v));
  return acc;
}
constexpr int32_t kByteZero = 128;
inline I dot4_byte(I acc, I w, I x) { return dot4(acc, w, x); }
constexpr int64_t kNibbleSums = 1 << 20;
inline I dot4_nibble(I sums, I w, I x) { return dot4(sums, w, x); }
inline I add_nibbles(I acc, I sums) { return acc + sums; }

inline float sum(F a) {
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
inline int32_t sum_i(I a) { return _mm512_reduce_add_epi32(a.v); }
inline float largest(F a) { return _mm512_reduce_max_ps(a.v); }

}  // namespace millrace::MILLRACE_ISA

#include "words.hpp"
