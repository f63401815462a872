// The sizes of a program: its symbols, which a run brings, and behind them those that are made of them (mr_size).
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "millrace.h"
#include "program_reader.hpp"

namespace millrace {

class Sizes {
 public:
  // Each is made of those before it, and of numbers that keep every step far from overflow.
  explicit Sizes(const mr_create_args& a) : n_symbols_(a.n_symbols), made_(a.sizes, a.sizes + a.n_sizes) {
    bounds_.assign(a.symbols, a.symbols + a.n_symbols);
    for (const mr_size& s : made_) {
      const int64_t before = static_cast<int64_t>(bounds_.size()) - 1;
      const bool number = s.kind == kNumber, floor = s.kind == kFloor;
      check(s.kind, kNumber, kFloor, "a size's kind");
      check(s.most, 1, INT32_MAX, "a size's bound");
      check(s.left, number ? 1 : 0, number ? INT32_MAX : before, "what a size is made of");
      check(s.right, floor ? 1 : 0, number || floor ? INT32_MAX : before, "what a size is made of");
      bounds_.push_back(s.most);
    }
    sizes_.resize(bounds_.size());
  }

  const std::vector<int32_t>& bounds() const { return bounds_; }

  // Whether a size is made of this symbol; such a size is never 0.
  bool uses(int32_t symbol) const {
    std::vector<bool> does(bounds_.size());
    does[static_cast<size_t>(symbol)] = true;
    size_t at = static_cast<size_t>(n_symbols_);
    for (const mr_size& s : made_)
      does[at++] = s.kind != kNumber && (does[static_cast<size_t>(s.left)] || (s.kind != kFloor && does[static_cast<size_t>(s.right)]));
    return std::any_of(does.begin() + n_symbols_, does.end(), [](bool d) { return d; });
  }

  // All of them in a run with such symbols, in the order of their numbers; they stay until the next one.
  const int32_t* find(const int32_t* symbols) {
    size_t at = static_cast<size_t>(n_symbols_);
    std::copy(symbols, symbols + at, sizes_.begin());
    for (const mr_size& s : made_) {
      int64_t found = s.left;
      if (s.kind != kNumber) {
        const int64_t left = sizes_[static_cast<size_t>(s.left)], sum = left + s.add;
        const int64_t right = s.kind == kFloor ? s.right : sizes_[static_cast<size_t>(s.right)];
        if (s.kind == kOver && right < 1) throw ProgramError("a size is divided by 0");
        if (s.kind == kOver && left % right) throw ProgramError("a size is not an integer");
        found = s.kind == kTimes ? left * right : s.kind == kOver ? left / right : sum / right - (sum % right < 0);
      }
      check(found, 1, s.most, "a size");
      sizes_[at++] = static_cast<int32_t>(found);
    }
    return sizes_.data();
  }

 private:
  enum { kNumber, kTimes, kOver, kFloor };

  static void check(int64_t value, int64_t low, int64_t high, const char* what) {
    if (value < low || value > high)
      throw ProgramError(std::string(what) + " is " + std::to_string(value) + ", not " + std::to_string(low) + " to " +
                         std::to_string(high));
  }

  const int32_t n_symbols_;
  const std::vector<mr_size> made_;
  std::vector<int32_t> bounds_, sizes_;
};

}  // namespace millrace
