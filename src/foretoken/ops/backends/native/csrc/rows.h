// Rows of raw logits. They are converted to FP32 and edited block by block, without a copy of a row.
#pragma once
#include "simd.h"

namespace foretoken {
constexpr int64_t kBlock = 1024;  // ids per block of the vocabulary
constexpr double kLogZero = -std::numeric_limits<double>::infinity();

enum Dtype { kFloat32, kBFloat16, kFloat16 };
inline int64_t bytes_of(int64_t dtype) { return dtype == kFloat32 ? 4 : 2; }

// Rows of `vocabulary` adjacent numbers, `stride` numbers apart.
struct Logits {
  const void* data;
  int64_t dtype, stride, vocabulary;
};

// `ops.Edits`; `mask_RW` and `mask_N` may be null.
struct Edits {
  const int32_t* mask_RW;
  const int64_t *mask_N, *start_N1, *token_M;
  const float *bias_M, *repetition_M, *subtract_M;
  int64_t words;
};

// One row with its edits.
struct Row {
  const void* data;
  int64_t dtype, size;
  const uint32_t* mask = nullptr;
  int64_t entries = 0;
  const int64_t* token = nullptr;
  const float *bias = nullptr, *repetition = nullptr, *subtract = nullptr;

  int64_t blocks() const { return (size + kBlock - 1) / kBlock; }
  // Edited logits of block j, padded with -inf: in place if possible, else in `buffer` (kBlock numbers).
  const float* block(int64_t j, float* buffer) const;
  // Length of block j with padding: a multiple of 256, so that no loop over it has a remainder.
  int64_t padded(int64_t j) const {
    const int64_t left = size - j * kBlock;
    return left < kBlock ? (left + 255) / 256 * 256 : kBlock;
  }
  float value(int64_t id) const;
  // Prefetch `count` logits of block j, from i on: in FP32 the next page, which no processor prefetches.
  void prefetch(int64_t j, int64_t i, int64_t count) const {
    const char* from = static_cast<const char*>(data) + (j * kBlock + i) * bytes_of(dtype);
    for (int64_t line = 0; line < count * bytes_of(dtype); line += 64) __builtin_prefetch(from + line);
  }

 private:
  float edited(float x, int64_t entry) const;
};

// Row n of `logits`; `edits` may be null.
Row row_of(const Logits& logits, const Edits* edits, int64_t n);
}  // namespace foretoken
