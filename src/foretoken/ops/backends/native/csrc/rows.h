// Rows of raw logits, converted and edited on load, a block at a time, so that no FP32 copy of a row
// is ever made.
#pragma once

#include "simd.h"

namespace foretoken {

constexpr int64_t kBlock = 1024;  // ids per block of the hierarchical draw
constexpr double kNothing = -std::numeric_limits<double>::infinity();

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
  // Edited logits of block j, then -inf up to `padded(j)`: in `buffer` (kBlock numbers) unless they
  // can be read in place.
  const float* block(int64_t j, float* buffer) const;
  // A multiple of 256, so that no loop over a block has a remainder.
  int64_t padded(int64_t j) const {
    const int64_t left = size - j * kBlock;
    return left < kBlock ? (left + 255) / 256 * 256 : kBlock;
  }
  float value(int64_t id) const;
  // Prefetch logits i, ..., i + count - 1 of block j, which may be past the end of the row. For the
  // block after the current one: processors do not prefetch across the end of a page, and 1024 numbers
  // in FP32 fill one.
  void fetch(int64_t j, int64_t i, int64_t count) const {
    const char* from = static_cast<const char*>(data) + (j * kBlock + i) * bytes_of(dtype);
    for (int64_t line = 0; line < count * bytes_of(dtype); line += 64) __builtin_prefetch(from + line);
  }

 private:
  float edited(float x, int64_t entry) const;
};

// Row n of `logits`; `edits` may be null.
Row row_of(const Logits& logits, const Edits* edits, int64_t n);

}  // namespace foretoken
