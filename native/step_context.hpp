// What a kernel knows of the step it runs in, and how workers share its tasks.
#pragma once
#include <cstdint>

#include "kernels_generated.hpp"
#include "layout.hpp"

namespace millrace {

constexpr int kPageTokens = 64;
constexpr int kSharedCounters = 1024;
constexpr int kMaxThreads = 1024;
enum class KvFormat : int32_t { f32 = 0, bf16 = 1, int8 = 2, fp8 = 3, int4 = 4 };

// Bits of an element; floats beside the key of a token, and beside its value; to what a value's size is rounded up;
// whether keys lie as their Hadamard transform (kernels/matmul/pack.py), which queries then take, too.
struct KvKind {
  int32_t bits, scales, columns;
  bool transformed;
};
constexpr KvKind kKvKinds[] = {{32, 0, 16, false}, {16, 0, 16, false}, {8, 1, 16, false}, {8, 1, 16, true}, {4, 2, 32, true}};
constexpr int kKvFormats = sizeof kKvKinds / sizeof *kKvKinds;

// Keys and values of the attention layers that are of one kind. A block is one (layer, page, KV head): first the keys,
// then the values.
//   f32   keys [D][64]       values [64][Dv]        D of a key; Dv of a value, rounded up
//   bf16  keys [D/2][64][2]  values [32][Dv][2]     pairs of neighbours along d, and along the tokens
//   int8  keys [D/4][64][4]  values [16][Dv][4]     fours of them: keys unsigned (code + 128), values signed;
//         each followed by 64 float scales, one a token
//   fp8   keys [D/2][64][2]  values [32][Dv][2]     pairs of E4M3; scales as above
//   int4  keys [D/8][64][4]  values [16][Dv/32][16][4]  bytes of two unsigned codes: of a key the lower half has element i
//         of eight and the upper one i + 4, of a value column i of 32 and i + 16 (Dv rounded up to 32). A byte is one
//         token's, so that workers write no byte together. Scales as above, then 64 minimums
// Keys are stored token-minor (64 tokens contiguous), so that 16 scores are one vector and no sum runs across lanes. The
// stored bits of a token depend only on that token, not on the chunk that writes them.
struct KvLayout {
  uint8_t* base;
  KvFormat format;
  int64_t layers, pages;
  int32_t heads, key_dim, value_dim;

  MILLRACE_INLINE const KvKind& kind() const { return kKvKinds[static_cast<int32_t>(format)]; }
  MILLRACE_INLINE int64_t plane_bytes(int64_t width) const { return kPageTokens * (width * kind().bits / 8 + kind().scales * 4); }
  MILLRACE_INLINE int64_t key_bytes() const { return plane_bytes(key_dim); }
  MILLRACE_INLINE int64_t value_width() const { return up(value_dim, kind().columns); }
  MILLRACE_INLINE int64_t block_bytes() const { return key_bytes() + plane_bytes(value_width()); }
  MILLRACE_INLINE int64_t layer_bytes() const { return pages * heads * block_bytes(); }
  MILLRACE_INLINE uint8_t* keys(int layer, int page, int head) const {
    return base + layer * layer_bytes() + (static_cast<int64_t>(page) * heads + head) * block_bytes();
  }
  // Where a format has them; minimums follow.
  [[gnu::always_inline]] float* scales_before(uint8_t* end) const {
    return reinterpret_cast<float*>(end) - kPageTokens * kind().scales;
  }
  [[gnu::always_inline]] float* key_scales(uint8_t* block) const { return scales_before(block + key_bytes()); }
  [[gnu::always_inline]] float* value_scales(uint8_t* block) const { return scales_before(block + block_bytes()); }
};

// A cache in a run: the place of its pages, and the page table of each sequence.
struct Cache {
  KvLayout layout;
  const int32_t* pages;
  const int32_t* offsets;  // (S) pages[offsets[s] + p] is page p of sequence s, counted from its position 0

  MILLRACE_INLINE uint8_t* block(int layer, int sequence, int position, int head) const {
    return layout.keys(layer, pages[offsets[sequence] + position / kPageTokens], head);
  }
};

// States of layers of one kind: (layers, slots, floats), and the slots of each sequence before and after this run.
struct States {
  float* base;
  int64_t slots, floats;
  const int32_t *from, *to;  // (S)

  [[gnu::always_inline]] float* slot(int layer, int32_t number) const { return base + (layer * slots + number) * floats; }
  [[gnu::always_inline]] const float* before(int layer, int sequence) const { return slot(layer, from[sequence]); }
  [[gnu::always_inline]] float* behind(int layer, int sequence) const { return slot(layer, to[sequence]); }
};

// T tokens of S sequences, packed: what attention asks for, and nothing else.
struct Sequences {
  int32_t count;
  const int32_t* positions;    // (T) in its sequence
  const int32_t* sequence_of;  // (T) the sequence of each token
  const int32_t* starts;       // (S+1)
};

// Rows (count, width) that stand in for those of the embedding table: of the tokens -1, -2 and so on.
struct EmbeddingRows {
  const float* rows;
  int32_t count, width;
};

struct StepContext {
  const int32_t* sizes;  // what the program's symbols are in this run, and the sizes that are made of them
  Sequences sequences;
  const Cache* caches;
  const States* states;
  EmbeddingRows embeddings;
  int32_t n_workers;
  int32_t* next_task;  // shared by the workers of this kernel
  float* scratch;      // this worker's own
  int64_t scratch_floats;
  uint8_t* shared;  // all workers'; its first kSharedCounters int32 are 0 between kernels
  int64_t shared_bytes;
  const Tactic* tactic;  // of this kernel's step

  int take() { return __atomic_fetch_add(next_task, 1, __ATOMIC_RELAXED); }
};

// Whether the product of n sizes, each from 1 on, is `expected`: a program whose sizes contradict each other computes nothing.
[[gnu::always_inline]] inline bool product_is(int64_t expected, const int32_t* sizes, int n) {
  int64_t total = 1;
  for (int i = 0; i < n; ++i) {
    total *= sizes[i];
    if (total > expected) return false;
  }
  return total == expected;
}

// `for (Chunk c(ctx, n, size); c.next();)` hands out [c.begin, c.end) until n is used up.
struct Chunk {
  Chunk(StepContext& context, int64_t n, int64_t size) : begin(0), end(0), context_(context), n_(n), size_(size) {}
  [[gnu::always_inline]] bool next() {  // a copy of one instruction set would be linked for all
    begin = context_.take() * size_;
    end = begin + size_ < n_ ? begin + size_ : n_;
    return begin < n_;
  }
  int64_t begin, end;

 private:
  StepContext& context_;
  int64_t n_, size_;
};

}  // namespace millrace
