// Noise by name: Philox4x32-10 (Salmon et al. 2011), counter = (group, position, draft index, stream),
// key = the sample's noise key. Draw i is made of word i of a stream, where a group has four words; in
// FP64 of words 2i and 2i + 1.
#pragma once
#include <cmath>
#include "simd.h"

namespace foretoken {
// As `ops/types.py: Stream`.
enum Stream { kTargetToken, kTargetBlock, kResidualToken, kResidualBlock, kDraftToken, kDraftBlock,
              kAccept };

struct StreamName {  // the key, and the words of the counter after the group
  uint32_t key[2];
  uint32_t position, draft_index, stream;
};

inline StreamName stream_name(int64_t key, int64_t position, int64_t draft_index, int64_t stream) {
  const auto bits = static_cast<uint64_t>(key);
  return {{static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)},
          static_cast<uint32_t>(position), static_cast<uint32_t>(draft_index),
          static_cast<uint32_t>(stream)};
}

constexpr uint32_t kMultipliers[] = {0xD2511F53u, 0xCD9E8D57u};
constexpr uint32_t kWeyl[] = {0x9E3779B9u, 0xBB67AE85u};

// The four words of one group.
inline void words(uint32_t group, const StreamName& name, uint32_t out[4]) {
  uint32_t k0 = name.key[0], k1 = name.key[1], c0 = group, c1 = name.position, c2 = name.draft_index,
           c3 = name.stream;
  for (int round = 0; round < 10; round++, k0 += kWeyl[0], k1 += kWeyl[1]) {
    const uint64_t p0 = uint64_t{kMultipliers[0]} * c0, p1 = uint64_t{kMultipliers[1]} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

// The words of 16 groups: out[w][g] is word w of group first + g.
inline void words16(uint32_t first, const StreamName& name, uint32_t out[4][16]) {
  constexpr int kVectors = 16 / kWidth;
  BitVec c0[kVectors], c1[kVectors], c2[kVectors], c3[kVectors];
  for (int i = 0; i < kVectors; i++) {
    for (int k = 0; k < kWidth; k++) c0[i][k] = first + static_cast<uint32_t>(i * kWidth + k);
    c1[i] = name.position - BitVec{};
    c2[i] = name.draft_index - BitVec{};
    c3[i] = name.stream - BitVec{};
  }
  uint32_t k0 = name.key[0], k1 = name.key[1];
  for (int round = 0; round < 10; round++, k0 += kWeyl[0], k1 += kWeyl[1]) {
    for (int i = 0; i < kVectors; i++) {
      const BitVec low0 = c0[i] * kMultipliers[0], low1 = c2[i] * kMultipliers[1];
      const BitVec high0 = multiply_high(c0[i], kMultipliers[0]);
      const BitVec high1 = multiply_high(c2[i], kMultipliers[1]);
      c0[i] = high1 ^ c1[i] ^ k0;
      c2[i] = high0 ^ c3[i] ^ k1;
      c1[i] = low1;
      c3[i] = low0;
    }
  }
  std::memcpy(out[0], c0, sizeof c0);
  std::memcpy(out[1], c1, sizeof c1);
  std::memcpy(out[2], c2, sizeof c2);
  std::memcpy(out[3], c3, sizeof c3);
}

// (h + 1/2) 2^-32 of a word h in FP32 arithmetic, at most 1 - 2^-24.
inline double uniform32(uint32_t word) {
  const float u = (static_cast<float>(word) + 0.5f) * 2.3283064365386963e-10f;
  return u < 0.99999994f ? u : 0.99999994f;
}

// (h + 1/2) 2^-53 of the upper 53 bits h of two words in FP64 arithmetic, at most 1 - 2^-53.
inline double uniform64(uint32_t high, uint32_t low) {
  const uint64_t h = (uint64_t{high} << 32 | low) >> 11;
  const double u = (static_cast<double>(h) + 0.5) * 0x1p-53;
  return u < 1 - 0x1p-53 ? u : 1 - 0x1p-53;
}

inline double uniform_at(int64_t index, const StreamName& name, bool fp64) {
  const int64_t word = fp64 ? 2 * index : index;
  uint32_t w[4];
  words(static_cast<uint32_t>(word / 4), name, w);
  const int64_t i = word % 4;
  return fp64 ? uniform64(w[i], w[i + 1]) : uniform32(w[i]);
}

// Gumbel noise of a uniform; the largest noise comes from u near 0, where floats are dense.
inline double gumbel(double u) { return -std::log(-std::log1p(-u)); }
}  // namespace foretoken
