// Elements of values as they lie in memory, of the types that kernels/layout.py numbers, and the numbers they become.
#pragma once
namespace millrace::MILLRACE_ISA {

enum class Type : int32_t { f32, i32, f16, i8, i64, boolean };

template <class V>
inline V element(const uint8_t* base, int64_t at) {
  V value;
  std::memcpy(&value, base + at * static_cast<int64_t>(sizeof(V)), sizeof(V));
  return value;
}
template <class V>
inline void put(uint8_t* base, int64_t at, V value) {
  std::memcpy(base + at * static_cast<int64_t>(sizeof(V)), &value, sizeof(V));
}

// IEEE binary32 to binary16, ties to even.
inline uint16_t float_to_half(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t size = bits & 0x7fffffff;
  if (size > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (size >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  if (size < 0x38800000) {  // subnormal there: 0.5's last bit is worth as much as theirs
    float sum;
    std::memcpy(&sum, &size, 4);
    sum += 0.5f;
    uint32_t code;
    std::memcpy(&code, &sum, 4);
    return static_cast<uint16_t>(sign | (code - 0x3f000000));
  }
  return static_cast<uint16_t>(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
}

// Towards 0; what is beyond a type becomes its end, and NaN 0.
inline int64_t truncated(float x, int bits) {
  const float end = bits == 64 ? 0x1p63f : bits == 32 ? 0x1p31f : 0x1p7f;
  const int64_t most = static_cast<int64_t>((uint64_t{1} << (bits - 1)) - 1);
  if (x != x) return 0;
  if (x >= end) return most;
  return x <= -end ? -most - 1 : static_cast<int64_t>(x);
}

inline float as_number(const uint8_t* base, Type type, int64_t at) {
  switch (type) {
    case Type::f32: return element<float>(base, at);
    case Type::i32: return static_cast<float>(element<int32_t>(base, at));
    case Type::f16: return half_to_float(element<uint16_t>(base, at));
    case Type::i8: return static_cast<float>(element<int8_t>(base, at));
    case Type::i64: return static_cast<float>(element<int64_t>(base, at));
    default: return base[at] ? 1.0f : 0.0f;
  }
}

inline int64_t as_whole(const uint8_t* base, Type type, int64_t at) {
  switch (type) {
    case Type::i32: return element<int32_t>(base, at);
    case Type::i8: return element<int8_t>(base, at);
    case Type::i64: return element<int64_t>(base, at);
    case Type::boolean: return base[at] != 0;
    default: return truncated(as_number(base, type, at), 64);
  }
}

inline void put_number(uint8_t* base, Type type, int64_t at, float x) {
  switch (type) {
    case Type::f32: return put(base, at, x);
    case Type::i32: return put(base, at, static_cast<int32_t>(truncated(x, 32)));
    case Type::f16: return put(base, at, float_to_half(x));
    case Type::i8: return put(base, at, static_cast<int8_t>(truncated(x, 8)));
    case Type::i64: return put(base, at, truncated(x, 64));
    default: return put(base, at, static_cast<uint8_t>(x != 0));
  }
}

inline void put_whole(uint8_t* base, Type type, int64_t at, int64_t x) {
  switch (type) {
    case Type::i32: return put(base, at, static_cast<int32_t>(x));
    case Type::i8: return put(base, at, static_cast<int8_t>(x));
    case Type::i64: return put(base, at, x);
    case Type::boolean: return put(base, at, static_cast<uint8_t>(x != 0));
    default: return put_number(base, type, at, static_cast<float>(x));
  }
}

}  // namespace millrace::MILLRACE_ISA
