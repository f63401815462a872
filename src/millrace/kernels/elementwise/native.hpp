// elementwise   y = expression(a, b, c, d), lane by lane
//   An expression is up to 24 codes, op | dst << 8 | left << 16 | right << 24, over 8 registers; code 0 ends it and its
//   `left` names the register with the result (kernels/expression.py writes it). a..d start in registers 0..3.
//   Each operation runs over a strip of vectors before the next is looked at, so the interpreter costs little.
#pragma once
namespace millrace::MILLRACE_ISA {

enum class Op : int32_t { end, add, sub, mul, div, max, min, neg, exp, sigmoid, tanh, sqrt, abs, immediate, erf };
constexpr int kStrip = 16;  // vectors a strip

inline F apply(Op op, F x, F y) {
  switch (op) {
    case Op::add: return x + y;
    case Op::sub: return x - y;
    case Op::mul: return x * y;
    case Op::div: return x / y;
    case Op::max: return unless_nan(max(x, y), x);  // a NaN on either side stays one
    case Op::min: return unless_nan(min(x, y), x);
    case Op::neg: return zero() - x;
    case Op::exp: return exp(x);
    case Op::sigmoid: return sigmoid(x);
    case Op::tanh: return tanh(x);
    case Op::sqrt: return sqrt(x);
    case Op::abs: return abs(x);
    case Op::erf: return erf(x);
    default: return x;
  }
}

// Runs the expression over `count` vectors of each register; gives back the register that holds the result.
inline int evaluate(const int32_t* code, const float* imm, F (*registers)[kStrip], int count) {
  for (int at = 0;; ++at) {
    const auto op = static_cast<Op>(code[at] & 255);
    const int dst = code[at] >> 8 & 7, left = code[at] >> 16 & 7, right = code[at] >> 24 & 7;
    if (op == Op::end || at == 23) return left;
    if (op == Op::immediate) {
      for (int i = 0; i < count; ++i) registers[dst][i] = splat(imm[left]);
      continue;
    }
    switch (op) {  // the loop inside the case: one dispatch a strip
#define STRIP(name) \
  case Op::name: \
    for (int i = 0; i < count; ++i) registers[dst][i] = apply(Op::name, registers[left][i], registers[right][i]); \
    break;
      STRIP(add) STRIP(sub) STRIP(mul) STRIP(div) STRIP(max) STRIP(min) STRIP(neg) STRIP(exp) STRIP(sigmoid)
      STRIP(tanh) STRIP(sqrt) STRIP(abs) STRIP(erf)
#undef STRIP
      default: break;
    }
  }
}

inline void elementwise(const ElementwiseArgs& a, StepContext& c) {
  const float* inputs[4] = {a.a, a.b, a.c, a.d};
  const int32_t strides[4] = {a.a_stride, a.b_stride, a.c_stride, a.d_stride};
  F registers[8][kStrip];
  for (Chunk t(c, c.sizes[a.rows], 4); t.next();)
    for (int64_t row = t.begin; row < t.end; ++row)
      for (int64_t from = 0; from < a.n; from += 16 * kStrip) {
        const int64_t left = a.n - from;
        const int count = left >= 16 * kStrip ? kStrip : static_cast<int>((left + 15) / 16);
        const int tail = left >= 16 * kStrip ? 16 : static_cast<int>(left - (count - 1) * 16);
        for (int k = 0; k < 4; ++k) {
          if (!inputs[k]) continue;
          const float* x = inputs[k] + row * strides[k] + from;
          for (int i = 0; i + 1 < count; ++i) registers[k][i] = load(x + 16 * i);
          registers[k][count - 1] = load(x + 16 * (count - 1), tail);
        }
        const int result = evaluate(a.code, a.imm, registers, count);
        float* y = a.y + row * a.n + from;
        for (int i = 0; i + 1 < count; ++i) store(y + 16 * i, registers[result][i]);
        store(y + 16 * (count - 1), registers[result][count - 1], tail);
      }
}

}  // namespace millrace::MILLRACE_ISA
