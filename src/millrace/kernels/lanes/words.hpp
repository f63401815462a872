// Codes of 16 bits times lines of bytes, by products of bytes: a code's high and low byte have sums of their own. AVX2 has
// products of 16 bits instead (lanes/avx2.hpp), which give the same integers.
#pragma once

namespace millrace::MILLRACE_ISA {

// How the bytes of a line stand for their values: 128 above them, or as they are.
enum class Bytes { biased, plain };

constexpr int kWordRows = 3, kWordLines = 4;  // of a tile: rows, and lines that are taken at a time

// Sixteen codes, -32639 to 32767, or beside plain bytes 0 to 32767; each half takes 16 bytes, and four codes meet the
// four bytes of a lane.
template <Bytes B>
inline void store_words(void* first, void* second, I codes) {
  const I high = B == Bytes::plain ? shift_right(codes, 8) : shift_right(codes + splat_i(128 + 32768), 8) - splat_i(128);
  store_i8(static_cast<int8_t*>(first), high);
  store_i8(static_cast<int8_t*>(second), codes - shift_left(high, 8));
}

// A line that several rows meet.
using Words = I;
template <Bytes>
inline Words words(I line) {
  return line;
}

struct WordSums {
  I high, low;
};
inline WordSums no_words() { return {splat_i(0), splat_i(0)}; }
template <Bytes B>
inline void add_words(WordSums& sums, Words line, const void* first, const void* second) {
  const I high = splat_bytes(first), low = splat_bytes(second);
  sums.high = B == Bytes::biased ? dot4(sums.high, line, high) : dot4(sums.high, high, line);
  sums.low = B == Bytes::biased ? dot4(sums.low, line, low) : dot4(sums.low, low, line);
}
inline I total(WordSums sums) { return shift_left(sums.high, 8) + sums.low; }

}  // namespace millrace::MILLRACE_ISA
