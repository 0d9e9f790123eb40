// Noise by name: Philox4x32-10 (Salmon et al. 2011), counter = (group, position, draft index,
// stream), key = the sample's 64 bits. Draw i of a stream is word i mod 4 of group i div 4; in FP64
// the words 2i and 2i + 1.
#pragma once

#include <cmath>
#include <cstdint>

#include "simd.h"

namespace foretoken {

// As `ops/types.py: Stream`.
enum Stream { kTargetToken, kTargetBlock, kResidualToken, kResidualBlock, kDraftToken, kDraftBlock,
              kAccept };

struct Address {
  uint32_t key[2];
  uint32_t position, draft_index, stream;
};

inline Address at(int64_t key, int64_t position, int64_t draft_index, int stream) {
  const auto bits = static_cast<uint64_t>(key);
  return {{static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)},
          static_cast<uint32_t>(position),
          static_cast<uint32_t>(draft_index),
          static_cast<uint32_t>(stream)};
}

// Words of groups first..first+count-1: out[w][g] is word w of group first + g.
template <int count>
inline void words(uint32_t first, const Address& a, uint32_t out[4][count]) {
  uint32_t k0 = a.key[0], k1 = a.key[1];
  for (int g = 0; g < count; g++) {
    out[0][g] = first + g;
    out[1][g] = a.position;
    out[2][g] = a.draft_index;
    out[3][g] = a.stream;
  }
  for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    for (int g = 0; g < count; g++) {
      const uint64_t p0 = uint64_t{0xD2511F53u} * out[0][g], p1 = uint64_t{0xCD9E8D57u} * out[2][g];
      out[0][g] = static_cast<uint32_t>(p1 >> 32) ^ out[1][g] ^ k0;
      out[1][g] = static_cast<uint32_t>(p1);
      out[2][g] = static_cast<uint32_t>(p0 >> 32) ^ out[3][g] ^ k1;
      out[3][g] = static_cast<uint32_t>(p0);
    }
  }
}

// FP32: (h + 1/2) 2^-32 in FP32 arithmetic, at most 1 - 2^-24: open at both ends.
inline double uniform32(uint32_t word) {
  const float u = (static_cast<float>(word) + 0.5f) * 2.3283064365386963e-10f;
  return u < 0.99999994f ? u : 0.99999994f;
}

// FP64: (h + 1/2) 2^-53 of the upper 53 bits of two words, at most 1 - 2^-53.
inline double uniform64(uint32_t high, uint32_t low) {
  const uint64_t h = (uint64_t{high} << 32 | low) >> 11;
  const double u = (static_cast<double>(h) + 0.5) * 0x1p-53;
  return u < 1 - 0x1p-53 ? u : 1 - 0x1p-53;
}

// Draw `index` of a stream.
inline double uniform_at(int64_t index, const Address& a, bool fp64) {
  const int64_t word = fp64 ? 2 * index : index;
  uint32_t w[4][1];
  words<1>(static_cast<uint32_t>(word / 4), a, w);
  const int64_t i = word % 4;
  return fp64 ? uniform64(w[i][0], w[i + 1][0]) : uniform32(w[i][0]);
}

// Uniforms to Gumbel noise: the winning tail lies at u -> 0, where floats are dense.
inline double gumbel(double u) { return -std::log(-std::log1p(-u)); }

}  // namespace foretoken
