// group_by_expert   pairs of a row and one of its experts, sorted by experts      experts, places (T, chosen) | row_of (T chosen)
//   In an expert's pairs, rows ascend. starts[e] is expert e's first pair; starts[n] the number of pairs.
//   One worker does it: there are few numbers. An expert that does not exist counts as the last.
#pragma once
namespace millrace::MILLRACE_ISA {

inline void group_by_expert(const GroupByExpertArgs& a, StepContext& c) {
  for (Chunk once(c, 1, 1); once.next();) {
    const int64_t pairs = static_cast<int64_t>(c.sizes[a.rows]) * a.chosen;
    const auto expert_of = [&](int64_t pair) {
      const int32_t e = a.experts[pair];
      return e >= 0 && e < a.n ? e : a.n - 1;
    };
    for (int e = 0; e <= a.n; ++e) a.starts[e] = 0;
    for (int64_t pair = 0; pair < pairs; ++pair) ++a.starts[expert_of(pair) + 1];
    for (int e = 0; e < a.n; ++e) a.starts[e + 1] += a.starts[e];
    for (int64_t pair = 0; pair < pairs; ++pair) {  // starts[e] is where the next pair of e belongs
      const int32_t place = a.starts[expert_of(pair)]++;
      a.places[pair] = place;
      a.row_of[place] = static_cast<int32_t>(pair / a.chosen);
    }
    for (int e = a.n; e > 0; --e) a.starts[e] = a.starts[e - 1];
    a.starts[0] = 0;
  }
}

}  // namespace millrace::MILLRACE_ISA
