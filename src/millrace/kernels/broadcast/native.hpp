// broadcast   y = expression(a, b, c, d) of dense values of any type and rank, by NumPy's rules of broadcasting
//   y has `rank` extents, of which an operand has those with a bit in its mask (bit i: extent i); it is repeated along all
//   others. Arithmetic is in float, as in elementwise, or, where `whole`, in int64, which wraps; what is stored is rounded or
//   wraps to y's type. Codes beyond erf are comparisons and a choice: `where` has its condition in the upper bits of dst.
//   Extents that all operands have, or lack, alike are walked as one; a task is so many elements of the last.
#pragma once
#include "broadcast/elements.hpp"
#include "elementwise/native.hpp"

namespace millrace::MILLRACE_ISA {

enum class More : int32_t { less = 15, less_equal, equal, not_equal, where };
constexpr int kBroadcastTask = 4096, kBroadcastStrip = 16 * kStrip;

struct BroadcastWalk {
  int rank = 0;
  int64_t extents[kRank], strides[4][kRank];  // in elements; 0: repeated
  int64_t run = 1, step[4];                   // of the last extent, 0 or 1 each
};

// Extents merged where all operands go on alike. False: the sizes contradict each other, which no builder writes.
inline bool broadcast_walk(const BroadcastArgs& a, const int32_t* sizes, BroadcastWalk& walk) {
  const int32_t masks[4] = {a.a_mask, a.b_mask, a.c_mask, a.d_mask};
  const int32_t counts[4] = {a.a_elements, a.b_elements, a.c_elements, a.d_elements};
  const uint8_t* inputs[4] = {a.a, a.b, a.c, a.d};
  int64_t total = 1, own[4] = {1, 1, 1, 1};
  int last = -1, pattern = -1;
  int patterns[kRank];
  for (int i = 0; i < a.rank; ++i) {
    const int64_t extent = sizes[a.extents[i]];
    int bits = 0;
    for (int k = 0; k < 4; ++k) bits |= (masks[k] >> i & 1) << k;
    total *= extent;
    if (total > INT32_MAX) return false;
    for (int k = 0; k < 4; ++k) own[k] *= masks[k] >> i & 1 ? extent : 1;
    if (extent == 1) continue;
    if (bits == pattern)
      walk.extents[last] *= extent;
    else {
      walk.extents[++last] = extent;
      patterns[last] = pattern = bits;
    }
  }
  if (total != sizes[a.elements]) return false;
  for (int k = 0; k < 4; ++k)
    if (inputs[k] && own[k] != sizes[counts[k]]) return false;
  int64_t at[4] = {1, 1, 1, 1};
  for (int i = last; i >= 0; --i)
    for (int k = 0; k < 4; ++k) {
      walk.strides[k][i] = patterns[i] >> k & 1 ? at[k] : 0;
      at[k] *= patterns[i] >> k & 1 ? walk.extents[i] : 1;
    }
  walk.rank = last < 0 ? 0 : last;
  walk.run = last < 0 ? 1 : walk.extents[last];
  for (int k = 0; k < 4; ++k) walk.step[k] = last < 0 ? 0 : walk.strides[k][last];
  return true;
}

inline F broadcast_compare(More op, F x, F y) {
  const uint32_t below = mask_greater_equal(y, x), above = mask_greater_equal(x, y);
  const uint32_t mask = op == More::less ? below & ~above : op == More::less_equal ? below
                      : op == More::equal ? below & above : ~(below & above);
  return only(mask & 0xffff, splat(1.0f));
}

inline int broadcast_floats(const int32_t* code, const float* imm, F (*registers)[kStrip], int count) {
  for (int at = 0;; ++at) {
    const int32_t word = code[at];
    const int op = word & 255, dst = word >> 8 & 7, third = word >> 11 & 7, left = word >> 16 & 7, right = word >> 24 & 7;
    if (op == 0 || at == 23) return left;
    if (op < static_cast<int>(More::less)) {
      const int32_t one[2] = {word, 0};
      if (op == static_cast<int>(Op::immediate))
        for (int i = 0; i < count; ++i) registers[dst][i] = splat(imm[left]);
      else
        evaluate(one, imm, registers, count);
    } else {
      const auto more = static_cast<More>(op);
      for (int i = 0; i < count; ++i)
        registers[dst][i] = more == More::where
                                ? if_less(zero(), abs(registers[third][i]), registers[left][i], registers[right][i])
                                : broadcast_compare(more, registers[left][i], registers[right][i]);
    }
  }
}

inline int64_t broadcast_whole(int op, int64_t x, int64_t y, int64_t condition) {
  const auto ux = static_cast<uint64_t>(x), uy = static_cast<uint64_t>(y);
  switch (op) {
    case static_cast<int>(Op::add): return static_cast<int64_t>(ux + uy);
    case static_cast<int>(Op::sub): return static_cast<int64_t>(ux - uy);
    case static_cast<int>(Op::mul): return static_cast<int64_t>(ux * uy);
    case static_cast<int>(Op::div): return y == 0 ? 0 : y == -1 ? static_cast<int64_t>(0 - ux) : x / y;
    case static_cast<int>(Op::max): return x > y ? x : y;
    case static_cast<int>(Op::min): return x < y ? x : y;
    case static_cast<int>(Op::neg): return static_cast<int64_t>(0 - ux);
    case static_cast<int>(Op::abs): return x < 0 ? static_cast<int64_t>(0 - ux) : x;
    case static_cast<int>(More::less): return x < y;
    case static_cast<int>(More::less_equal): return x <= y;
    case static_cast<int>(More::equal): return x == y;
    case static_cast<int>(More::not_equal): return x != y;
    case static_cast<int>(More::where): return condition ? x : y;
    default: return x;
  }
}

// As `evaluate`, in int64; gives back the register that holds the result.
inline int broadcast_integers(const int32_t* code, const float* imm, int64_t (*registers)[kBroadcastStrip], int count) {
  for (int at = 0;; ++at) {
    const int32_t word = code[at];
    const int op = word & 255, dst = word >> 8 & 7, third = word >> 11 & 7, left = word >> 16 & 7, right = word >> 24 & 7;
    if (op == 0 || at == 23) return left;
    if (op == static_cast<int>(Op::immediate)) {
      const int64_t value = truncated(imm[left], 64);
      for (int i = 0; i < count; ++i) registers[dst][i] = value;
      continue;
    }
    for (int i = 0; i < count; ++i)
      registers[dst][i] = broadcast_whole(op, registers[left][i], registers[right][i], registers[third][i]);
  }
}

// `count` elements of an operand from `at` on, or all the same one, as vectors.
inline void broadcast_load(const uint8_t* base, Type type, int64_t at, int64_t step, int count, F* into) {
  const int vectors = (count + 15) / 16, tail = count - (vectors - 1) * 16;
  if (step == 0) {
    const F same = splat(as_number(base, type, at));
    for (int i = 0; i < vectors; ++i) into[i] = same;
    return;
  }
  alignas(64) float numbers[kBroadcastStrip];
  const float* x = numbers;
  if (type == Type::f32)
    x = reinterpret_cast<const float*>(base) + at;
  else
    for (int i = 0; i < count; ++i) numbers[i] = as_number(base, type, at + i);
  for (int i = 0; i + 1 < vectors; ++i) into[i] = load(x + 16 * i);
  into[vectors - 1] = load(x + 16 * (vectors - 1), tail);
}

inline void broadcast_store(uint8_t* base, Type type, int64_t at, int count, const F* from) {
  const int vectors = (count + 15) / 16, tail = count - (vectors - 1) * 16;
  alignas(64) float numbers[kBroadcastStrip];
  float* y = type == Type::f32 ? reinterpret_cast<float*>(base) + at : numbers;
  for (int i = 0; i + 1 < vectors; ++i) store(y + 16 * i, from[i]);
  store(y + 16 * (vectors - 1), from[vectors - 1], tail);
  if (type != Type::f32)
    for (int i = 0; i < count; ++i) put_number(base, type, at + i, numbers[i]);
}

inline void broadcast(const BroadcastArgs& a, StepContext& c) {
  BroadcastWalk walk;
  if (!broadcast_walk(a, c.sizes, walk)) return;
  const uint8_t* inputs[4] = {a.a, a.b, a.c, a.d};
  const Type types[4] = {static_cast<Type>(a.a_type), static_cast<Type>(a.b_type), static_cast<Type>(a.c_type),
                         static_cast<Type>(a.d_type)};
  const auto y_type = static_cast<Type>(a.y_type);
  const int64_t pieces = (walk.run + kBroadcastTask - 1) / kBroadcastTask, tasks = c.sizes[a.elements] / walk.run * pieces;
  const int64_t at_once = walk.run >= kBroadcastTask ? 1 : kBroadcastTask / walk.run;
  F floats[8][kStrip];
  int64_t integers[8][kBroadcastStrip];
  for (Chunk chunk(c, tasks, at_once); chunk.next();)
    for (int64_t task = chunk.begin; task < chunk.end; ++task) {
      const int64_t row = task / pieces, first = task % pieces * kBroadcastTask;
      const int64_t end = first + kBroadcastTask < walk.run ? first + kBroadcastTask : walk.run;
      int64_t starts[4] = {0, 0, 0, 0}, rest = row;
      for (int i = walk.rank - 1; i >= 0; rest /= walk.extents[i--])
        for (int k = 0; k < 4; ++k) starts[k] += rest % walk.extents[i] * walk.strides[k][i];
      for (int64_t from = first; from < end; from += kBroadcastStrip) {
        const int count = static_cast<int>(end - from < kBroadcastStrip ? end - from : kBroadcastStrip);
        for (int k = 0; k < 4; ++k) {
          if (!inputs[k]) continue;
          const int64_t at = starts[k] + from * walk.step[k];
          if (a.whole)
            for (int i = 0; i < count; ++i) integers[k][i] = as_whole(inputs[k], types[k], at + i * walk.step[k]);
          else
            broadcast_load(inputs[k], types[k], at, walk.step[k], count, floats[k]);
        }
        const int64_t to = row * walk.run + from;
        if (a.whole) {
          const int result = broadcast_integers(a.code, a.imm, integers, count);
          for (int i = 0; i < count; ++i) put_whole(a.y, y_type, to + i, integers[result][i]);
        } else
          broadcast_store(a.y, y_type, to, count, floats[broadcast_floats(a.code, a.imm, floats, (count + 15) / 16)]);
      }
    }
}

}  // namespace millrace::MILLRACE_ISA
