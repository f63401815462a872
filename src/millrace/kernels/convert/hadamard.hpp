// Groups of inputs times Hadamard matrices: see kernels/matmul/pack.py, whose steps these are.
#pragma once

namespace millrace::MILLRACE_ISA {

// Neighbours at distance D of each lane: their sum in the lower one, their difference in the upper one.
template <int D>
inline F sums_and_differences(F x) {
  alignas(64) static constexpr float kSigns[4][16] = {
      {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1},
      {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1},
      {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1},
      {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1}};
  return fma(x, load(kSigns[D == 1 ? 0 : D == 2 ? 1 : D == 4 ? 2 : 3]), exchanged<D>(x));
}

// 1 / sqrt(n) of a power of two, rounded.
inline float root_of(int64_t n) {
  float scale = 1;
  for (; n >= 4; n /= 4) scale *= 0.5f;
  return n == 2 ? scale * 0.70710678118654752f : scale;
}

// A block of V vectors.
template <int V>
inline void hadamard_vectors(const float* x, float* y) {
  const F scale = splat(root_of(16 * V));
  F v[V];
#pragma GCC unroll 8
  for (int i = 0; i < V; ++i) {
    v[i] = sums_and_differences<1>(load(x + 16 * i));
    v[i] = sums_and_differences<2>(v[i]);
    v[i] = sums_and_differences<4>(v[i]);
    v[i] = sums_and_differences<8>(v[i]);
  }
#pragma GCC unroll 3
  for (int d = 1; d < V; d *= 2)
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i)
      if (!(i & d)) {
        const F sum = v[i] + v[i + d], difference = v[i] - v[i + d];
        v[i] = sum;
        v[i + d] = difference;
      }
#pragma GCC unroll 8
  for (int i = 0; i < V; ++i) store(y + 16 * i, v[i] * scale);
}

// A block of less than a vector.
inline void hadamard_lanes(const float* x, int n, float* y) {
  F v = load(x, n);
  if (n > 1) v = sums_and_differences<1>(v);
  if (n > 2) v = sums_and_differences<2>(v);
  if (n > 4) v = sums_and_differences<4>(v);
  store(y, v * splat(root_of(n)), n);
}

// One group of n.
inline void hadamard_group(const float* x, int64_t n, float* y) {
  int64_t at = 0, size = kHadamardBlock;
  for (; at < n; at += size) {
    while (size > n - at) size /= 2;
    switch (size) {
      case 128: hadamard_vectors<8>(x + at, y + at); break;
      case 64: hadamard_vectors<4>(x + at, y + at); break;
      case 32: hadamard_vectors<2>(x + at, y + at); break;
      case 16: hadamard_vectors<1>(x + at, y + at); break;
      default: hadamard_lanes(x + at, static_cast<int>(size), y + at);
    }
  }
}

}  // namespace millrace::MILLRACE_ISA
