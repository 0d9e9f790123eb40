#include "rows.h"
#include <algorithm>

namespace foretoken {
namespace {
template <Vec (*to_floats)(HalfVec)>
void convert(const uint16_t* row, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    HalfVec h;
    std::memcpy(&h, row + i, sizeof h);
    store(out + i, to_floats(h));
  }
  if (i == count) return;
  HalfVec h = {};
  std::memcpy(&h, row + i, (count - i) * sizeof(uint16_t));
  const Vec rest = to_floats(h);
  std::memcpy(out + i, &rest, (count - i) * sizeof(float));
}

// Set x[i] to -inf where bit i of `mask` is 0.
void drop_masked(float* x, int64_t padded, int64_t words, const uint32_t* mask) {
  IntVec lane;
  for (int i = 0; i < kWidth; i++) lane[i] = 1 << i;
  for (int64_t i = 0; i < padded && i < words * 32; i += kWidth) {
    const auto bits = static_cast<int32_t>(mask[i / 32] >> (i % 32));
    const IntVec kept = ((bits - IntVec{}) & lane) != 0;
    store(x + i, kept ? load(x + i) : splat(kMinusInfinity));
  }
}
}  // namespace

Row row_of(const Logits& logits, const Edits* edits, int64_t n) {
  const char* data = static_cast<const char*>(logits.data);
  Row row{data + n * logits.stride * bytes_of(logits.dtype), logits.dtype, logits.vocabulary};
  if (!edits) return row;
  if (edits->mask_N && edits->mask_N[n] >= 0)
    row.mask = reinterpret_cast<const uint32_t*>(edits->mask_RW) + edits->mask_N[n] * edits->words;
  const int64_t first = edits->start_N1[n];
  row.entries = edits->start_N1[n + 1] - first;
  row.token = edits->token_M + first;
  row.bias = edits->bias_M + first;
  row.repetition = edits->repetition_M + first;
  row.subtract = edits->subtract_M + first;
  return row;
}

float Row::edited(float x, int64_t i) const {
  const float biased = x + bias[i];
  return (biased > 0 ? biased / repetition[i] : biased * repetition[i]) - subtract[i];
}

const float* Row::block(int64_t j, float* buffer) const {
  const int64_t first = j * kBlock, count = std::min(size - first, kBlock);
  const int64_t *entry = token, *end = token + entries;
  if (entries) {
    entry = std::lower_bound(token, end, first);
    end = std::lower_bound(entry, end, first + count);
  }
  if (dtype == kFloat32) {
    const float* here = static_cast<const float*>(data) + first;
    if (count == padded(j) && !mask && entry == end) return here;
    std::memcpy(buffer, here, count * sizeof(float));
  } else {
    const uint16_t* here = static_cast<const uint16_t*>(data) + first;
    if (dtype == kBFloat16) {
      convert<from_bfloat16>(here, count, buffer);
    } else {
      convert<from_float16>(here, count, buffer);
    }
  }
  for (int64_t i = count; i < padded(j); i++) buffer[i] = kMinusInfinity;
  if (mask) drop_masked(buffer, padded(j), (count + 31) / 32, mask + first / 32);
  for (; entry < end; entry++) buffer[*entry - first] = edited(buffer[*entry - first], entry - token);
  return buffer;
}

float Row::value(int64_t id) const {
  float x;
  if (dtype == kFloat32) {
    x = static_cast<const float*>(data)[id];
  } else {
    HalfVec h = {};
    h[0] = static_cast<const uint16_t*>(data)[id];
    x = (dtype == kBFloat16 ? from_bfloat16(h) : from_float16(h))[0];
  }
  if (mask && !(mask[id / 32] >> (id % 32) & 1)) x = kMinusInfinity;
  if (entries) {
    const int64_t* entry = std::lower_bound(token, token + entries, id);
    if (entry < token + entries && *entry == id) x = edited(x, entry - token);
  }
  return x;
}
}  // namespace foretoken
