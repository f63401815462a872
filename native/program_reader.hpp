// Reading a program: hostile bytes in, checked pointers out.
#pragma once
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "layout.hpp"

namespace millrace {

struct ProgramError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Reader {
 public:
  Reader(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}
  bool done() const { return at_ == end_; }
  uint32_t u32() { return take<uint32_t>(); }
  uint64_t u64() { return take<uint64_t>(); }
  int32_t i32() { return take<int32_t>(); }
  float f32() { return take<float>(); }

 private:
  template <class V>
  V take() {
    if (static_cast<size_t>(end_ - at_) < sizeof(V)) throw ProgramError("the program ends in the middle of a step");
    V value;
    std::memcpy(&value, at_, sizeof(V));
    at_ += sizeof(V);
    return value;
  }
  const uint8_t* at_;
  const uint8_t* end_;
};

constexpr int64_t kMaxParam = 1 << 24;  // keeps every size expression far from overflow

// The buffers that a program may touch. A reference is a space in the top byte and an offset below it.
struct Bounds {
  const uint8_t* weights;
  int64_t weights_bytes;
  uint8_t* activations;
  int64_t activations_bytes;
  const int32_t* symbols;  // how large each of the program's symbols may be, at most kMaxParam; then its other sizes
  int64_t n_symbols;

  int64_t symbol(int64_t number) const {
    require(number >= 0 && number < n_symbols, "a size that the program has");
    return symbols[number];
  }

  void require(bool holds, const char* condition) const {
    if (!holds) throw ProgramError(std::string("an illegal step, ") + condition + " does not hold");
  }

  uint8_t* resolve(uint64_t ref, int64_t bytes, bool writes, bool optional, const char* place) const {
    const uint64_t space = ref >> 56, offset = ref & 0x00ffffffffffffffULL;
    if (space == 0 && optional) return nullptr;
    if (space != 1 && space != 2) throw ProgramError(std::string(place) + " lies in no known buffer");
    if (space == 1 && writes) throw ProgramError(std::string(place) + " would write into the weights");
    const int64_t room = space == 1 ? weights_bytes : activations_bytes;
    if (bytes < 0 || offset % 4 != 0 || offset > static_cast<uint64_t>(room) ||
        static_cast<uint64_t>(bytes) > static_cast<uint64_t>(room) - offset)
      throw ProgramError(std::string(place) + ": " + std::to_string(bytes) + " bytes at " + std::to_string(offset) +
                         " leave its buffer of " + std::to_string(room));
    return (space == 1 ? const_cast<uint8_t*>(weights) : activations) + offset;
  }
};

}  // namespace millrace
