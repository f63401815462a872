// The probe's inner loops for one instruction set. As in isa_unit.cpp, no inline code of the standard library here.
#include <cstdint>

#include "probe.hpp"

#include MILLRACE_LANES

#define MILLRACE_STRING_(x) #x
#define MILLRACE_STRING(x) MILLRACE_STRING_(x)
#define MILLRACE_JOIN_(a, b) a##b
#define MILLRACE_JOIN(a, b) MILLRACE_JOIN_(a, b)

namespace millrace {
namespace {

constexpr int kChains = 16;  // independent sums: more than latency times issue width

#if defined(__AVX512F__)

using Line = __m512i;
Line load_line(const uint8_t* p) { return _mm512_load_si512(p); }
Line mix(Line a, Line b) { return _mm512_or_si512(a, b); }
uint64_t folded(Line a) { return static_cast<uint64_t>(_mm512_reduce_or_epi64(a)); }

float fp32(int64_t rounds) {
  __m512 sum[kChains];
  for (auto& s : sum) s = _mm512_set1_ps(1.0f);
  const __m512 a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(0.25f);
  for (int64_t r = 0; r < rounds; ++r)
    for (auto& s : sum) s = _mm512_fmadd_ps(s, a, b);
  __m512 all = sum[0];
  for (const auto& s : sum) all = _mm512_add_ps(all, s);
  return _mm512_cvtss_f32(all);
}

float bf16(int64_t rounds) {
  __m512 sum[kChains];
  for (auto& s : sum) s = _mm512_setzero_ps();
  const __m512bh a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5f), _mm512_set1_ps(0.5f));
  for (int64_t r = 0; r < rounds; ++r)
    for (auto& s : sum) s = _mm512_dpbf16_ps(s, a, a);
  __m512 all = sum[0];
  for (const auto& s : sum) all = _mm512_add_ps(all, s);
  return _mm512_cvtss_f32(all);
}

float int8(int64_t rounds) {
  __m512i sum[kChains];
  for (auto& s : sum) s = _mm512_setzero_si512();
  const __m512i a = _mm512_set1_epi8(1);
  for (int64_t r = 0; r < rounds; ++r)
    for (auto& s : sum) s = _mm512_dpbusd_epi32(s, a, a);
  __m512i all = sum[0];
  for (const auto& s : sum) all = _mm512_add_epi32(all, s);
  return static_cast<float>(_mm512_cvtsi512_si32(all));
}

constexpr RateLoop kFp32{fp32, kChains * 16 * 2}, kBf16{bf16, kChains * 32 * 2}, kVectors{int8, kChains * 64 * 2};

#elif defined(__AVX2__)

using Line = __m256i;
Line load_line(const uint8_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
Line mix(Line a, Line b) { return _mm256_or_si256(a, b); }
uint64_t folded(Line a) { return static_cast<uint64_t>(_mm256_extract_epi64(a, 0) | _mm256_extract_epi64(a, 3)); }

constexpr int kRegisters = 12;  // of 16, the rest holds the constants

float fp32(int64_t rounds) {
  __m256 sum[kRegisters];
  for (auto& s : sum) s = _mm256_set1_ps(1.0f);
  const __m256 a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(0.25f);
  for (int64_t r = 0; r < rounds; ++r)
    for (auto& s : sum) s = _mm256_fmadd_ps(s, a, b);
  __m256 all = sum[0];
  for (const auto& s : sum) all = _mm256_add_ps(all, s);
  return _mm256_cvtss_f32(all);
}

constexpr int kPairs = 8;  // each waits for itself; with more of them GCC keeps some in memory

// Two instructions instead of one: products of pairs in 16 bits, added up there, as codes of four bits allow for a while
// before their sums go to 32 bits.
float int8(int64_t rounds) {
  __m256i sum[kPairs];
  for (auto& s : sum) s = _mm256_setzero_si256();
  const __m256i b = _mm256_set1_epi8(1);
  for (int64_t r = 0; r < rounds; ++r)
    for (auto& s : sum) s = _mm256_add_epi16(s, _mm256_maddubs_epi16(s, b));
  __m256i all = sum[0];
  for (const auto& s : sum) all = _mm256_add_epi16(all, s);
  return static_cast<float>(_mm256_cvtsi256_si32(all));
}

constexpr RateLoop kFp32{fp32, kRegisters * 8 * 2}, kBf16{}, kVectors{int8, kPairs * 32 * 2};

#else

struct Line {
  uint64_t a, b;
};
Line load_line(const uint8_t* p) {
  const auto* words = reinterpret_cast<const uint64_t*>(p);
  return {words[0], words[1]};
}
Line mix(Line a, Line b) { return {a.a | b.a, a.b | b.b}; }
uint64_t folded(Line a) { return a.a | a.b; }

float fp32(int64_t rounds) {
  float sum[kChains];
  for (auto& s : sum) s = 1.0f;
  for (int64_t r = 0; r < rounds; ++r)
    for (auto& s : sum) s = s * 0.5f + 0.25f;
  float all = 0;
  for (const auto s : sum) all += s;
  return all;
}

constexpr RateLoop kFp32{fp32, kChains * 2}, kBf16{}, kVectors{};

#endif

#if defined(MILLRACE_TILES)

using namespace MILLRACE_ISA;  // where tiles are emulated, it has the instructions as functions

void zero_tiles() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(6);
}

// Four sums of 16 x 16, each from 32 products.
float tiles(int64_t rounds) {
  const MILLRACE_ISA::Tiles configured(16, 16);
  zero_tiles();
  for (int64_t r = 0; r < rounds; ++r) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 6);
    _tile_dpbf16ps(2, 4, 6);
    _tile_dpbf16ps(3, 4, 6);
  }
  return 0;
}

// The same of 64 integer products.
float byte_tiles(int64_t rounds) {
  const MILLRACE_ISA::Tiles configured(16, 16);
  zero_tiles();
  for (int64_t r = 0; r < rounds; ++r) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 6);
    _tile_dpbssd(2, 4, 6);
    _tile_dpbssd(3, 4, 6);
  }
  return 0;
}

constexpr RateLoop kTiles{tiles, 4 * 16 * 16 * 32 * 2}, kInt8{byte_tiles, 4 * 16 * 16 * 64 * 2};

#else

constexpr RateLoop kTiles{}, kInt8 = kVectors;

#endif

uint64_t read(const uint8_t* data, int64_t bytes) {
  constexpr int64_t kLines = 8;
  Line sum[kLines] = {};
  for (int64_t i = 0; i < bytes; i += kLines * static_cast<int64_t>(sizeof(Line)))
    for (int64_t j = 0; j < kLines; ++j) sum[j] = mix(sum[j], load_line(data + i + j * static_cast<int64_t>(sizeof(Line))));
  Line all = sum[0];
  for (const auto& s : sum) all = mix(all, s);
  return folded(all);
}

}  // namespace

extern const ProbeLoops MILLRACE_JOIN(probe_, MILLRACE_ISA);
const ProbeLoops MILLRACE_JOIN(probe_, MILLRACE_ISA) = {
    MILLRACE_STRING(MILLRACE_ISA), read, {kFp32, kBf16, kInt8, kTiles},
};

}  // namespace millrace
