// Noise by name: Philox4x32-10 (Salmon et al. 2011), counter = (group, position, draft index,
// stream), key = the sample's 64 bits. Draw i of a stream is word i mod 4 of group i div 4.
#pragma once

#include <cstdint>

#include "simd.h"

namespace foretoken {

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

constexpr int kGroups = 16;  // groups per call of `words`: 64 draws

// Words of groups first..first+kGroups-1: out[w][g] is word w of group first + g.
inline void words(uint32_t first, const Address& a, uint32_t out[4][kGroups]) {
  uint32_t k0 = a.key[0], k1 = a.key[1];
  for (int g = 0; g < kGroups; g++) {
    out[0][g] = first + g;
    out[1][g] = a.position;
    out[2][g] = a.draft_index;
    out[3][g] = a.stream;
  }
  for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    for (int g = 0; g < kGroups; g++) {
      const uint64_t p0 = uint64_t{0xD2511F53u} * out[0][g], p1 = uint64_t{0xCD9E8D57u} * out[2][g];
      out[0][g] = static_cast<uint32_t>(p1 >> 32) ^ out[1][g] ^ k0;
      out[1][g] = static_cast<uint32_t>(p1);
      out[2][g] = static_cast<uint32_t>(p0 >> 32) ^ out[3][g] ^ k1;
      out[3][g] = static_cast<uint32_t>(p0);
    }
  }
}

// (h + 1/2) 2^-32 in FP32 arithmetic, at most 1 - 2^-24: open at both ends.
inline float uniform(uint32_t word) {
  const float u = (static_cast<float>(word) + 0.5f) * 2.3283064365386963e-10f;
  return u < 0.99999994f ? u : 0.99999994f;
}

// Draw `index` of a stream.
inline float uniform_at(int64_t index, const Address& a) {
  uint32_t w[4][kGroups];
  words(static_cast<uint32_t>(index / 4), a, w);
  return uniform(w[index % 4][0]);
}

// Draws first..first+63 of a stream; `first` is a multiple of 4.
inline void uniforms(int64_t first, const Address& a, float out[4 * kGroups]) {
  uint32_t w[4][kGroups];
  words(static_cast<uint32_t>(first / 4), a, w);
  for (int g = 0; g < kGroups; g++)
    for (int i = 0; i < 4; i++) out[4 * g + i] = uniform(w[i][g]);
}

// Uniforms to Gumbel noise, -log(-log(1 - u)): the winning tail lies at u -> 0, where floats are
// dense.
inline Vec gumbel(Vec u) { return -log(-log1m(u)); }

}  // namespace foretoken
