#include "tiles.hpp"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <mutex>

namespace millrace::emulated {

namespace {

constexpr int kTiles = 8, kRows = 16, kRowBytes = 64, kColumns = kRowBytes / 4;  // of palette 1

struct Tile {
  int rows, row_bytes;
  alignas(64) uint8_t row[kRows][kRowBytes];

  bool valid() const { return rows > 0; }
  int columns() const { return row_bytes / 4; }
  template <class T>
  T at(int r, int i) const {
    T value;
    std::memcpy(&value, row[r] + i * sizeof(T), sizeof value);
    return value;
  }
  // What lies behind its rows and columns becomes zero.
  void replace(const uint8_t (&rows_of)[kRows][kRowBytes]) {
    std::memset(row, 0, sizeof row);
    for (int r = 0; r < rows; ++r) std::memcpy(row[r], rows_of[r], static_cast<size_t>(row_bytes));
  }
};

struct State {
  bool configured;
  int start_row;
  Tile tile[kTiles];
};

thread_local State state;
std::mutex fault_mutex;
char first_fault[256];

template <class... Values>
bool refused(const char* format, Values... values) {
  const std::lock_guard lock(fault_mutex);
  if (first_fault[0] == 0) std::snprintf(first_fault, sizeof first_fault, format, values...);
  return true;
}

bool refused_tile(const char* instruction, int tile) {
  if (!state.configured) return refused("%s: #UD: tiles are not configured", instruction);
  if (tile < 0 || tile >= kTiles) return refused("%s: #UD: there is no tmm%d", instruction, tile);
  if (!state.tile[tile].valid()) return refused("%s: #UD: tmm%d has no rows in the configuration", instruction, tile);
  if (state.tile[tile].row_bytes % 4)
    return refused("%s: #UD: rows of tmm%d have %d bytes, which is no multiple of 4", instruction, tile, state.tile[tile].row_bytes);
  return false;
}

bool refused_move(const char* instruction, int tile) {
  if (refused_tile(instruction, tile)) return true;
  if (state.start_row >= state.tile[tile].rows)
    return refused("%s: #UD: starts at row %d of %d of tmm%d", instruction, state.start_row, state.tile[tile].rows, tile);
  return false;
}

bool refused_product(const char* instruction, int sums, int a, int b) {
  if (refused_tile(instruction, sums) || refused_tile(instruction, a) || refused_tile(instruction, b)) return true;
  if (sums == a || sums == b || a == b)
    return refused("%s: #UD: tmm%d, tmm%d, tmm%d are not three tiles", instruction, sums, a, b);
  const Tile &c = state.tile[sums], &x = state.tile[a], &w = state.tile[b];
  if (c.rows != x.rows || c.row_bytes != w.row_bytes || x.columns() != w.rows)
    return refused("%s: #UD: shapes (rows x bytes) tmm%d %dx%d += tmm%d %dx%d times tmm%d %dx%d do not match", instruction,
                   sums, c.rows, c.row_bytes, a, x.rows, x.row_bytes, b, w.rows, w.row_bytes);
  return false;
}

// As under DAZ, whatever the thread's own mode is.
float without_subnormal(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

// The float nearest to an exact sum, ties to even, as under FTZ: 0 if it is subnormal with 24 bits of precision. A double
// holds the sum of a float and a product of two bfloat16 exactly, or else the smaller one is too small to change the result.
float rounded(double sum) {
  constexpr double kLargestSubnormal = 0x1p-126 - 0x1p-151;  // from here on the nearest is 2^-126
  return std::fabs(sum) < kLargestSubnormal ? static_cast<float>(std::copysign(0.0, sum)) : static_cast<float>(sum);
}

double bf16(const Tile& tile, int row, int i) {
  const uint32_t bits = static_cast<uint32_t>(tile.at<uint16_t>(row, i)) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return without_subnormal(value);
}

int32_t byte(bool with_sign, uint8_t x) { return with_sign ? static_cast<int8_t>(x) : x; }

}  // namespace

void load_configuration(const void* from) {
  uint8_t bytes[64];
  std::memcpy(bytes, from, sizeof bytes);
  if (bytes[0] == 0) return release_tiles();  // the initial state, whatever follows
  const char* const name = "LDTILECFG";
  if (bytes[0] != 1) {
    refused("%s: #GP: palette %d", name, bytes[0]);
    return;
  }
  for (int i = 2; i < 64; ++i)
    if ((i < 16 || (i >= 32 && i < 48) || i >= 56) && bytes[i]) {
      refused("%s: #GP: the reserved byte %d is %d", name, i, bytes[i]);
      return;
    }
  State next = {};
  next.configured = true;
  next.start_row = bytes[1];
  for (int t = 0; t < kTiles; ++t) {
    Tile& tile = next.tile[t];
    tile.rows = bytes[48 + t];
    tile.row_bytes = bytes[16 + 2 * t] | bytes[17 + 2 * t] << 8;
    if (tile.rows > kRows || tile.row_bytes > kRowBytes || (tile.rows == 0) != (tile.row_bytes == 0)) {
      refused("%s: #GP: tmm%d has %d rows of %d bytes", name, t, tile.rows, tile.row_bytes);
      return;
    }
  }
  state = next;
}

void load_tile(int tile, const void* from, int64_t stride) {
  if (refused_move("TILELOADD", tile)) return;
  Tile& t = state.tile[tile];
  for (int r = state.start_row; r < kRows; ++r) {
    std::memset(t.row[r], 0, kRowBytes);
    if (r < t.rows) std::memcpy(t.row[r], static_cast<const uint8_t*>(from) + r * stride, static_cast<size_t>(t.row_bytes));
  }
  state.start_row = 0;
}

void store_tile(int tile, void* to, int64_t stride) {
  if (refused_move("TILESTORED", tile)) return;
  const Tile& t = state.tile[tile];
  for (int r = state.start_row; r < t.rows; ++r)
    std::memcpy(static_cast<uint8_t*>(to) + r * stride, t.row[r], static_cast<size_t>(t.row_bytes));
  state.start_row = 0;
}

void zero_tile(int tile) {
  if (refused_tile("TILEZERO", tile)) return;
  std::memset(state.tile[tile].row, 0, sizeof state.tile[tile].row);
  state.start_row = 0;
}

// Even and odd products have sums of their own, fused and from 0, which are added to each other and then to the tile.
void multiply_bf16(int sums, int a, int b) {
  if (refused_product("TDPBF16PS", sums, a, b)) return;
  Tile& c = state.tile[sums];
  const Tile &x = state.tile[a], &w = state.tile[b];
  double weights[kRows][2 * kColumns];
  for (int k = 0; k < w.rows; ++k)
    for (int i = 0; i < 2 * kColumns; ++i) weights[k][i] = bf16(w, k, i);
  alignas(64) uint8_t result[kRows][kRowBytes] = {};
  for (int m = 0; m < c.rows; ++m) {
    float total[2 * kColumns] = {};  // of even, of odd products, in turn
    for (int k = 0; k < x.columns(); ++k) {
      const double pair[2] = {bf16(x, m, 2 * k), bf16(x, m, 2 * k + 1)};
      for (int i = 0; i < 2 * kColumns; ++i) total[i] = rounded(static_cast<double>(total[i]) + pair[i % 2] * weights[k][i]);
    }
    for (int n = 0; n < c.columns(); ++n) {
      const double both = rounded(static_cast<double>(total[2 * n]) + total[2 * n + 1]);
      const float sum = rounded(without_subnormal(c.at<float>(m, n)) + both);
      std::memcpy(result[m] + 4 * n, &sum, sizeof sum);
    }
  }
  c.replace(result);
  state.start_row = 0;
}

// In 32 bits, which wrap.
void multiply_bytes(Signs signs, int sums, int a, int b) {
  static constexpr const char* kNames[] = {"TDPBSSD", "TDPBSUD", "TDPBUSD", "TDPBUUD"};
  if (refused_product(kNames[static_cast<int>(signs)], sums, a, b)) return;
  const bool x_signed = signs == Signs::both || signs == Signs::first, w_signed = signs == Signs::both || signs == Signs::second;
  Tile& c = state.tile[sums];
  const Tile &x = state.tile[a], &w = state.tile[b];
  int32_t weights[kRows][4][kColumns];
  for (int k = 0; k < w.rows; ++k)
    for (int n = 0; n < kColumns; ++n)
      for (int i = 0; i < 4; ++i) weights[k][i][n] = byte(w_signed, w.row[k][4 * n + i]);
  alignas(64) uint8_t result[kRows][kRowBytes] = {};
  for (int m = 0; m < c.rows; ++m) {
    uint32_t total[kColumns];
    std::memcpy(total, c.row[m], sizeof total);
    for (int k = 0; k < x.columns(); ++k)
      for (int i = 0; i < 4; ++i) {
        const int32_t value = byte(x_signed, x.row[m][4 * k + i]);
        for (int n = 0; n < kColumns; ++n) total[n] += static_cast<uint32_t>(value * weights[k][i][n]);
      }
    std::memcpy(result[m], total, sizeof total);
  }
  c.replace(result);
  state.start_row = 0;
}

void release_tiles() { state = {}; }

void fault(char* message, int64_t bytes) {
  const std::lock_guard lock(fault_mutex);
  std::snprintf(message, static_cast<size_t>(bytes), "%s", first_fault);
  first_fault[0] = 0;
}

}  // namespace millrace::emulated
