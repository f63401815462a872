// Sixteen virtual lanes in portable C++: the contract that every instruction set keeps, bit for bit.
//
//   F: 16 floats, I: 16 int32. Every operation is per lane, rounds to nearest even, and flushes subnormals as the thread
//   is set (platform.hpp). max(a, b) is a > b ? a : b. round() goes to the nearest integer, ties to even.
//   sum() adds lane i to lane i+8, then i+4, i+2, i+1: one fixed tree.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace millrace::MILLRACE_ISA {

// Rows of a tile of a matrix product, by what fits into registers: of floats and bfloat16, of 4-bit and of 8-bit codes,
// of codes that become bfloat16 pairs. Integer products take kLines of a panel's two lines at a time.
constexpr int kTileRows = 4, kNibbleRows = 4, kByteRows = 4, kPairRows = 4;
constexpr int kLines = 2;
constexpr int kRowsApart = 0;  // up to so many rows sum low and high nibbles apart

struct F {
  float v[16];
};
struct I {
  int32_t v[16];
};

template <class Op>
inline F each(Op op) {
  F r;
  for (int i = 0; i < 16; ++i) r.v[i] = op(i);
  return r;
}
template <class Op>
inline I each_i(Op op) {
  I r;
  for (int i = 0; i < 16; ++i) r.v[i] = op(i);
  return r;
}

inline F load(const float* p) { return each([=](int i) { return p[i]; }); }
inline F load(const float* p, int n) { return each([=](int i) { return i < n ? p[i] : 0.0f; }); }
inline void store(float* p, F a) { std::memcpy(p, a.v, sizeof a.v); }
inline void store(float* p, F a, int n) {
  for (int i = 0; i < n; ++i) p[i] = a.v[i];
}
inline F splat(float x) { return each([=](int) { return x; }); }
inline F zero() { return splat(0.0f); }
inline F operator+(F a, F b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
inline F operator-(F a, F b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
inline F operator*(F a, F b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
inline F operator/(F a, F b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
inline F fma(F a, F b, F c) { return each([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); }); }
inline F max(F a, F b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline F min(F a, F b) { return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
// a, or b where b is NaN.
inline F unless_nan(F a, F b) { return each([&](int i) { return b.v[i] != b.v[i] ? b.v[i] : a.v[i]; }); }
inline F sqrt(F a) { return each([&](int i) { return __builtin_sqrtf(a.v[i]); }); }
inline F abs(F a) { return each([&](int i) { return __builtin_fabsf(a.v[i]); }); }
// a - floor(a), which rounds to 1 just below 0.
inline F fraction(F a) { return each([&](int i) { return a.v[i] - __builtin_floorf(a.v[i]); }); }
// a in [1, 2] times 2^floor(n), -127 <= n < 127; 0 where that is subnormal.
inline F times_power(F a, F n) {
  return each([&](int i) {
    const float floor = __builtin_floorf(n.v[i]);
    const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(floor < 127 ? floor : 127) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return a.v[i] * power;
  });
}
// Lanes below n from a, the rest from other.
inline F first(F a, int n, F other) { return each([&](int i) { return i < n ? a.v[i] : other.v[i]; }); }
// Lane i from lane i ^ D.
template <int D>
inline F exchanged(F a) {
  return each([&](int i) { return a.v[i ^ D]; });
}
inline F if_less(F a, F b, F then, F other) {
  return each([&](int i) { return a.v[i] < b.v[i] ? then.v[i] : other.v[i]; });
}
inline uint32_t mask_greater_equal(F a, F b) {
  uint32_t mask = 0;
  for (int i = 0; i < 16; ++i) mask |= static_cast<uint32_t>(a.v[i] >= b.v[i]) << i;
  return mask;
}
// The lanes of the mask from a, 0 elsewhere.
inline F only(uint32_t mask, F a) { return each([&](int i) { return mask >> i & 1 ? a.v[i] : 0.0f; }); }
// Writes base + lane for each lane of the mask, ascending, and returns how many; up to 16 are written.
inline int append(uint32_t mask, int64_t base, int32_t* out) {
  int n = 0;
  for (; mask; mask &= mask - 1) out[n++] = static_cast<int32_t>(base + __builtin_ctz(mask));
  return n;
}

inline I load_i(const void* p) {
  I r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
inline void store_i(void* p, I a) { std::memcpy(p, a.v, sizeof a.v); }
inline I splat_i(int32_t x) { return each_i([=](int) { return x; }); }
// The four bytes at p in every lane.
inline I splat_bytes(const void* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return splat_i(x);
}
inline I operator+(I a, I b) { return each_i([&](int i) { return a.v[i] + b.v[i]; }); }
inline I operator-(I a, I b) { return each_i([&](int i) { return a.v[i] - b.v[i]; }); }
inline I operator&(I a, I b) { return each_i([&](int i) { return a.v[i] & b.v[i]; }); }
inline I shift_left(I a, int n) {
  return each_i([&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << n); });
}
inline I shift_right(I a, int n) {  // zeros come in from the left
  return each_i([&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) >> n); });
}
inline I round(F a) { return each_i([&](int i) { return static_cast<int32_t>(__builtin_nearbyintf(a.v[i])); }); }
inline F to_float(I a) { return each([&](int i) { return static_cast<float>(a.v[i]); }); }
inline F as_float(I a) {
  F r;
  std::memcpy(r.v, a.v, sizeof r.v);
  return r;
}
inline I as_int(F a) {
  I r;
  std::memcpy(r.v, a.v, sizeof r.v);
  return r;
}

inline I if_nan(F x, I then, I other) {
  return each_i([&](int i) { return __builtin_isnan(x.v[i]) ? then.v[i] : other.v[i]; });
}

// IEEE binary16 to binary32, exactly; its subnormals are numbers here.
inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
  uint32_t bits;
  if (exponent == 31)
    bits = sign | 0x7f800000u | fraction << 13;
  else if (exponent > 0)
    bits = sign | (exponent + 112) << 23 | fraction << 13;
  else {
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    std::memcpy(&bits, &magnitude, 4);
    bits |= sign;
  }
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline F load_half(const uint16_t* p) { return each([=](int i) { return half_to_float(p[i]); }); }
inline void store_u16(uint16_t* p, I a) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<uint16_t>(a.v[i]);
}
inline void store_u16_apart(uint16_t* p, I a, int n) {  // to every other: what lies between belongs to somebody else
  uint16_t bits[16];
  store_u16(bits, a);
  for (int i = 0; i < n; ++i) p[2 * i] = bits[i];
}
inline I load_i8(const int8_t* p) { return each_i([=](int i) { return static_cast<int32_t>(p[i]); }); }
inline void store_i8(int8_t* p, I a) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(a.v[i]);
}

// acc + odd product, then + even product: bfloat16 pairs, the even element in the low half (as vdpbf16ps does it).
inline F dot2(F acc, I w, I x) {
  const I high = splat_i(static_cast<int32_t>(0xffff0000u));
  acc = fma(as_float(w & high), as_float(x & high), acc);
  return fma(as_float(shift_left(w, 16)), as_float(shift_left(x, 16)), acc);
}

// Thirty-two codes of E4M3, two of each lane, as bfloat16 pairs, exactly: its own subnormals are normal numbers there.
// In which order lanes come is the instruction set's business; in_order puts their sums right.
// What is no number in E4M3 would become 480: no weights have it (matmul/pack.py).
inline int32_t e4m3_to_bf16(uint8_t code) {
  constexpr int32_t kSubnormals[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  const int32_t magnitude = code & 0x7f, sign = (code & 0x80) << 8;
  return sign | (magnitude < 8 ? kSubnormals[magnitude] : 0x3c00 + (magnitude << 4));
}
inline I load_e4m3(const uint8_t* p) {
  return each_i([=](int i) {
    const uint32_t odd = static_cast<uint32_t>(e4m3_to_bf16(p[2 * i + 1]));
    return static_cast<int32_t>(odd << 16) | e4m3_to_bf16(p[2 * i]);
  });
}

inline F in_order(F a) { return a; }

// acc + the dot product of four unsigned bytes of w with four signed bytes of x, exactly.
inline I dot4(I acc, I w, I x) {
  int8_t xs[64];
  uint8_t ws[64];
  std::memcpy(xs, x.v, 64);
  std::memcpy(ws, w.v, 64);
  return each_i([&](int i) {
    int32_t total = acc.v[i];
    for (int b = 4 * i; b < 4 * i + 4; ++b) total += ws[b] * xs[b];
    return total;
  });
}

// Of codes: four bytes of w stand for themselves less 128, of which kByteZero is left to be taken off (all or nothing).
constexpr int32_t kByteZero = 128;
inline I dot4_byte(I acc, I w, I x) { return dot4(acc, w, x); }

// Of nibbles, bytes of w below 16: sums of up to kNibbleSums products, to be added to what has room for them.
constexpr int64_t kNibbleSums = 1 << 20;
inline I dot4_nibble(I sums, I w, I x) { return dot4(sums, w, x); }
inline I add_nibbles(I acc, I sums) { return acc + sums; }

inline float sum(F a) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a.v[i] = a.v[i] + a.v[i + width];
  return a.v[0];
}
inline int32_t sum_i(I a) {
  int32_t total = 0;
  for (int32_t x : a.v) total += x;
  return total;
}
inline float largest(F a) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a.v[i] = a.v[i] > a.v[i + width] ? a.v[i] : a.v[i + width];
  return a.v[0];
}

}  // namespace millrace::MILLRACE_ISA

#include "words.hpp"
