// The vector passes of sampling over one row of n logits; native/sampling.cpp holds the logic.
#pragma once
namespace millrace::MILLRACE_ISA {

// The largest logit of each kLookBlock into `most`; returns the largest of all, NaN where any logit is not finite.
inline float row_look(const float* x, int64_t n, float* most) {
  F check = zero();
  float m = -__builtin_inff();
  each_block(n, kLookBlock, [&](int64_t block, int64_t from, int64_t to) {
    most[block] = row_largest(x + from, to - from, check);
    m = m < most[block] ? most[block] : m;
  });
  return m + sum(check);
}

// p[i] = 2^((x[i] - m) * scale), m at least every x; the sum of each block of 1024 into sums (16 lanes, then the fixed
// tree). p may be null, or x.
inline void row_exp2(const float* x, int64_t n, float m, float scale, float* p, float* sums) {
  each_block(n, kSampleBlock, [&](int64_t block, int64_t from, int64_t to) {
    F total = zero();
    each_vector(from, to, [&](int64_t i, auto lanes) {
      const F e = lanes.only(exp2_to_zero((lanes.load(x + i) - splat(m)) * splat(scale)), zero());
      total = total + e;
      if (p) lanes.store(p + i, e);
    });
    sums[block] = sum(total);
  });
}

// One block of row_weigh, weighed against m: its maxima and sums, and what is listed. Returns the largest logit.
template <bool kBand, bool kBase>
inline float weigh_block(const float* x, int64_t block, int64_t from, int64_t to, float m, float scale, const Band& band,
                         Weights& out, F& check) {
  F total = zero(), high = zero();
  float block_most = -__builtin_inff();
  int32_t* ids = out.ids + out.found;
  for (int64_t begin = from; begin < to; begin += kLookBlock) {
    const int64_t end = begin + kLookBlock < to ? begin + kLookBlock : to;
    F most = splat(-__builtin_inff());
    const auto weigh = [&](int64_t i, auto lanes) {
      const F v = lanes.load(x + i), e = lanes.only(exp2_to_zero((v - splat(m)) * splat(scale)), zero());
      check = fma(v, zero(), check);
      most = lanes.only(max(v, most), most);
      total = total + (kBase ? only(mask_greater_equal(v, splat(band.base)), e) : e);
      if (!kBand) return 0u;
      const uint32_t from_ceiling = lanes.only(mask_greater_equal(v, splat(band.ceiling)));
      high = high + only(from_ceiling, e);
      return lanes.only(mask_greater_equal(v, splat(band.floor))) & ~from_ceiling;
    };
    int64_t i = begin;
    for (; i + 64 <= end; i += 64) {  // four vectors a branch: nearly all have something, or nearly none
      uint32_t mask[4];
      for (int k = 0; k < 4; ++k) mask[k] = weigh(i + 16 * k, AllLanes{});
      if (kBand && (mask[0] | mask[1] | mask[2] | mask[3]))
        for (int k = 0; k < 4; ++k) ids += append(mask[k], i + 16 * k, ids);
    }
    each_vector(i, end, [&](int64_t at, auto lanes) {
      const uint32_t mask = weigh(at, lanes);
      if (kBand) ids += append(mask, at, ids);
    });
    const float part_most = out.most[begin / kLookBlock] = largest(most);
    block_most = block_most < part_most ? part_most : block_most;
  }
  out.all[block] = sum(total);
  if (kBand) {
    out.above[block] = sum(high);
    out.found = ids - out.ids;
  }
  return block_most;
}

// All of a first look at the row, in one pass: each block is weighed against the largest logit before it, and the sums
// are brought to the row's afterwards. Without a band nothing is listed, and `above` is left alone.
template <bool kBand, bool kBase>
inline void weigh_row(const float* x, int64_t n, float scale, const Band& band, Weights& out) {
  F check = zero();
  out.found = 0;
  out.m = x[0];
  each_block(n, kSampleBlock, [&](int64_t block, int64_t from, int64_t to) {
    const int64_t found = out.found;
    const float most = weigh_block<kBand, kBase>(x, block, from, to, out.m, scale, band, out, check);
    out.references[block] = out.m;
    if ((most - out.m) * scale > 64) {  // the sums might overflow
      out.references[block] = most;
      out.found = found;
      weigh_block<kBand, kBase>(x, block, from, to, most, scale, band, out, check);
    }
    out.m = out.m < most ? most : out.m;
  });
  each_vector(0, (n + kSampleBlock - 1) / kSampleBlock, [&](int64_t b, auto lanes) {
    const F factor = exp2_to_zero((lanes.load(out.references + b) - splat(out.m)) * splat(scale));
    lanes.store(out.all + b, lanes.load(out.all + b) * factor);
    if (kBand) lanes.store(out.above + b, lanes.load(out.above + b) * factor);
  });
  out.m = out.m + sum(check);
}
inline void row_weigh(const float* x, int64_t n, float scale, const Band* band, Weights& out) {
  if (!band)
    weigh_row<false, false>(x, n, scale, {}, out);
  else if (band->base > -__builtin_inff())
    weigh_row<true, true>(x, n, scale, *band, out);
  else
    weigh_row<true, false>(x, n, scale, *band, out);
}

// The first index whose element is at least `value`; n where there is none.
inline int64_t row_find(const float* x, int64_t n, float value) {
  for (int64_t i = 0; i < n; i += 16) {
    const int count = n - i < 16 ? static_cast<int>(n - i) : 16;
    const uint32_t mask = mask_greater_equal(SomeLanes{count}.load(x + i), splat(value)) & ((1u << count) - 1);
    if (mask) return i + __builtin_ctz(mask);
  }
  return n;
}

// How many elements are at least `floor`; what these weigh, p, into mass.
inline int64_t row_mass(const float* x, const float* p, int64_t n, float floor, double& mass) {
  int64_t found = 0;
  mass = 0;
  each_block(n, kSampleBlock, [&](int64_t, int64_t from, int64_t to) {
    F total[2] = {zero(), zero()};  // two chains hide the latency of their additions
    const auto add = [&](int64_t i, auto lanes, F& sum) {
      const uint32_t mask = lanes.only(mask_greater_equal(lanes.load(x + i), splat(floor)));
      sum = sum + only(mask, lanes.load(p + i));
      found += __builtin_popcount(mask);
    };
    int64_t i = from;
    for (; i + 32 <= to; i += 32)
      for (int k = 0; k < 2; ++k) add(i + 16 * k, AllLanes{}, total[k]);
    each_vector(i, to, [&](int64_t at, auto lanes) { add(at, lanes, total[0]); });
    mass += static_cast<double>(sum(total[0] + total[1]));
  });
  return found;
}

// How many elements are larger than `value`.
inline int64_t row_rank(const float* x, int64_t n, float value) {
  int64_t not_larger = 0;
  each_vector(0, n, [&](int64_t i, auto lanes) {
    not_larger += __builtin_popcount(lanes.only(mask_greater_equal(splat(value), lanes.load(x + i))));
  });
  return n - not_larger;
}

}  // namespace millrace::MILLRACE_ISA
