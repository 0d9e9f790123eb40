#include "formats.h"
#include <cstring>

namespace foretoken {
namespace {
constexpr int64_t kSuper = 256;  // inputs of a block of the K formats

int64_t block_bytes(Kind kind) {
  switch (kind) {
    case kQ8_0: return 34;
    case kQ4_0: return 18;
    case kQ4_1: return 20;
    case kQ5_0: return 22;
    case kQ5_1: return 24;
    case kQ4_K: return 144;
    case kQ5_K: return 176;
    case kQ6_K: return 210;
    default: return 0;
  }
}

bool is_super(Kind kind) { return kind == kQ4_K || kind == kQ5_K || kind == kQ6_K; }

// The block that contains a step of 32 inputs; `part`: the number of the step within the block.
const uint8_t* block_of(const FileRow& row, int64_t step, int64_t* part) {
  const int64_t parts = is_super(row.kind) ? kSuper / kGroup : 1;
  *part = step % parts;
  return row.data + step / parts * block_bytes(row.kind);
}

template <typename T>
T read(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// The low nibbles of 16 bytes are codes 0 to 15, the high nibbles codes 16 to 31.
void read_nibbles(const uint8_t* from, uint8_t* code) {
  for (int i = 0; i < 16; i++) {
    code[i] = from[i] & 15;
    code[i + 16] = from[i] >> 4;
  }
}

// The integers of scale and minimum of part i, six bits each, in the twelve bytes of Q4_K and Q5_K.
void read_six_bits(const uint8_t* from, int64_t i, uint8_t* scale, uint8_t* minimum) {
  if (i < 4) {
    *scale = from[i] & 63;
    *minimum = from[i + 4] & 63;
  } else {
    *scale = (from[i + 4] & 15) | (from[i - 4] >> 6 << 4);
    *minimum = (from[i + 4] >> 4) | (from[i] >> 6 << 4);
  }
}

void read_q6_k(const uint8_t* block, int64_t part, Codes* out) {
  const int64_t half = part / 4, quarter = part % 4;
  const uint8_t* low = block + half * 64 + quarter % 2 * 32;
  const uint8_t* high = block + 128 + half * 32;
  for (int i = 0; i < kGroup; i++) {
    const int nibble = quarter < 2 ? low[i] & 15 : low[i] >> 4;
    out->code[i] = nibble | (high[i] >> 2 * quarter & 3) << 4;
  }
  out->scale = block[192 + 2 * part];
  out->minimum = block[192 + 2 * part + 1];
}

void decode_plain(const FileRow& row, int64_t inputs, float* out) {
  if (row.kind == kF32) {
    std::memcpy(out, row.data, inputs * sizeof(float));
    return;
  }
  for (int64_t k = 0; k < inputs; k++) {
    if (row.kind == kBF16) {
      const uint32_t bits = uint32_t{read<uint16_t>(row.data + 2 * k)} << 16;
      std::memcpy(out + k, &bits, 4);
    } else {
      out[k] = half_to_float(read<uint16_t>(row.data + 2 * k));
    }
  }
}
}  // namespace

float half_to_float(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16, rest = uint32_t{bits & 0x7fffu} << 13;
  float value;
  std::memcpy(&value, &rest, sizeof value);
  value *= 5.192296858534828e33f;  // 2^112: the exponent's new bias
  uint32_t wide;
  std::memcpy(&wide, &value, sizeof wide);
  if (rest >= 0x0f800000u) wide = rest | 0x7f800000u;  // infinity or NaN
  wide |= sign;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

int64_t rows_of(const Matrix& matrix) {
  int64_t rows = 0;
  for (int64_t i = 0; i < matrix.count; i++) rows += matrix.parts[i]->count;
  return rows;
}

FileRow row_of(const Part& part, int64_t row) {
  const int64_t stored = part.order ? part.order[row] : row;
  const int64_t inputs = part.stride * (part.kind == kInt4 ? 2 : 1);  // for kInt8 and kInt4
  const int64_t groups = part.group ? inputs / part.group : 0;
  return {static_cast<Kind>(part.kind), part.data + stored * part.stride,
          part.scales ? part.scales + stored * groups : nullptr};
}

FileRow row_of(const Matrix& matrix, int64_t row) {
  int64_t i = 0;
  while (row >= matrix.parts[i]->count) row -= matrix.parts[i++]->count;
  return row_of(*matrix.parts[i], row);
}

void read_codes(const FileRow& row, int64_t step, Codes* out) {
  int64_t part = 0;
  const uint8_t* block = block_of(row, step, &part);
  switch (row.kind) {
    case kQ8_0:
    case kInt8: {
      const uint8_t* from = row.kind == kInt8 ? row.data + step * kGroup : block + 2;
      for (int i = 0; i < kGroup; i++) out->code[i] = from[i] ^ 128;  // -128 becomes 0
      break;
    }
    case kInt4:
      for (int i = 0; i < kGroup; i++) out->code[i] = row.data[step * 16 + i / 2] >> 4 * (i % 2) & 15;
      break;
    case kQ4_0:
    case kQ4_1:
      read_nibbles(block + (row.kind == kQ4_0 ? 2 : 4), out->code);
      break;
    case kQ5_0:
    case kQ5_1: {
      const uint8_t* from = block + (row.kind == kQ5_0 ? 2 : 4);
      const auto high = read<uint32_t>(from);
      read_nibbles(from + 4, out->code);
      for (int i = 0; i < kGroup; i++) out->code[i] |= (high >> i & 1) << 4;
      break;
    }
    case kQ4_K:
    case kQ5_K: {
      read_six_bits(block + 4, part, &out->scale, &out->minimum);
      const uint8_t* nibbles = block + (row.kind == kQ4_K ? 16 : 48) + part / 2 * 32;
      for (int i = 0; i < kGroup; i++) {
        out->code[i] = part % 2 ? nibbles[i] >> 4 : nibbles[i] & 15;
        if (row.kind == kQ5_K) out->code[i] |= (block[16 + i] >> part & 1) << 4;
      }
      break;
    }
    case kQ6_K:
      read_q6_k(block, part, out);
      break;
    default:
      break;
  }
}

BlockScales read_scales(const FileRow& row, int64_t step) {
  int64_t part = 0;
  const uint8_t* block = block_of(row, step, &part);
  switch (row.kind) {
    case kQ4_1:
    case kQ5_1:
    case kQ4_K:
    case kQ5_K:
      return {read<uint16_t>(block), read<uint16_t>(block + 2)};
    case kQ6_K:
      return {read<uint16_t>(block + 208), 0};
    default:
      return {read<uint16_t>(block), 0};
  }
}

void decode_row(const FileRow& row, int64_t inputs, float* out) {
  if (row.kind <= kF16) return decode_plain(row, inputs, out);
  Codes codes{};
  for (int64_t step = 0; step < inputs / kGroup; step++, out += kGroup) {
    read_codes(row, step, &codes);
    if (row.kind >= kInt8) continue;  // only embeddings are decoded, and none has these formats
    const BlockScales block = read_scales(row, step);
    const float scale = half_to_float(block.scale), minimum = half_to_float(block.minimum);
    for (int i = 0; i < kGroup; i++) {
      const int code = codes.code[i];
      switch (row.kind) {
        case kQ8_0: out[i] = scale * (code - 128); break;
        case kQ4_0: out[i] = scale * (code - 8); break;
        case kQ5_0: out[i] = scale * (code - 16); break;
        case kQ4_1:
        case kQ5_1: out[i] = scale * code + minimum; break;
        case kQ6_K:
          out[i] = scale * static_cast<int8_t>(i < 16 ? codes.scale : codes.minimum) * (code - 32);
          break;
        default: out[i] = scale * codes.scale * code - minimum * codes.minimum;
      }
    }
  }
}
}  // namespace foretoken
