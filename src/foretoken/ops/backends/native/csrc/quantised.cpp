// Products with weights in block formats. A panel holds, for each step of 32 inputs, of kVecs vectors of
// outputs: a header, if a block begins; the scales of the step; `Bits` vectors of codes per vector.
#include "gemm.h"

namespace foretoken {
namespace {
typedef uint8_t ByteVec __attribute__((vector_size(kWidth * 4)));
typedef int16_t ShortVec __attribute__((vector_size(kWidth * 4)));

// Bytes from a load to its prefetch. Processors do not look ahead over the instructions of a step with
// five rows: five rows times 144 MB took 11.7 ms without prefetches, 5.2 ms with them (one row: 4.2).
constexpr int64_t kAhead = 8192;

constexpr int kQuads = kGroup / 4;    // groups of four inputs, which a lane holds
constexpr float kLeast = 0x1p-100f;  // 127 / this is finite; if no number is larger, all round to 0

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr bool kHasVnni = true;
#else
constexpr bool kHasVnni = false;
#endif

// Whether codes of eight bits are multiplied, and stored, as signed numbers.
#if defined(__AVX2__)
constexpr bool kSignedBytes = !kHasVnni;
#else
constexpr bool kSignedBytes = false;
#endif

enum class Scales {
  kHalf,     // per 32 inputs an FP16 scale
  kMinimum,  // per 32 inputs an FP16 scale and an FP16 minimum
  kSmall,    // per 256 inputs an FP16 scale and minimum, per 32 inputs a byte that multiplies each
  kHalves,   // per 256 inputs an FP16 scale, per 16 inputs a signed byte that multiplies it
  kWide,     // per `group` inputs an FP32 scale
};

struct Layout {
  int bits, offset;
  Scales scales;
  // Bytes per output of a block's header, and of a step's scales.
  constexpr int header() const {
    return scales == Scales::kSmall || scales == Scales::kWide ? 4 : scales == Scales::kHalves ? 2 : 0;
  }
  constexpr int step() const {
    return scales == Scales::kMinimum ? 4 : scales == Scales::kWide ? 0 : 2;
  }
  constexpr int codes() const { return bits * kGroup / 8; }
  constexpr int64_t steps(int64_t group) const {  // of a block
    return scales == Scales::kWide ? group / kGroup : header() ? 8 : 1;
  }
};

constexpr Layout layout_of(Kind kind) {
  switch (kind) {
    case kQ8_0: return {8, kSignedBytes ? 0 : 128, Scales::kHalf};
    case kQ4_0: return {4, 8, Scales::kHalf};
    case kQ4_1: return {4, 0, Scales::kMinimum};
    case kQ5_0: return {5, 16, Scales::kHalf};
    case kQ5_1: return {5, 0, Scales::kMinimum};
    case kQ4_K: return {4, 0, Scales::kSmall};
    case kQ5_K: return {5, 0, Scales::kSmall};
    case kQ6_K: return {6, 32, Scales::kHalves};
    case kInt8: return {8, kSignedBytes ? 0 : 128, Scales::kWide};
    default: return {4, 8, Scales::kWide};  // kInt4
  }
}

template <typename T>
T load_as(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

Vec halves(const uint8_t* from) { return from_halves(load_as<HalfVec>(from)); }

template <typename Byte>
Vec bytes_as_floats(const uint8_t* from) {
  typedef Byte Narrow __attribute__((vector_size(kWidth)));
  return __builtin_convertvector(__builtin_convertvector(load_as<Narrow>(from), IntVec), Vec);
}

ByteVec shifted_right(ByteVec v, int bits) {  // the caller must mask off the upper bits of each byte
  return (ByteVec)((ShortVec)v >> bits);
}

// The codes of inputs 4j to 4j + 3 of a step in each lane: AVX2 lacks registers for all codes of a step.
template <int Bits>
ByteVec codes_at(const uint8_t* from, int j) {
  const auto vector = [&](int i) { return load_as<ByteVec>(from + i * sizeof(ByteVec)); };
  if constexpr (Bits == 8) return vector(j);
  const ByteVec low = (j < 4 ? vector(j) : shifted_right(vector(j - 4), 4)) & 15;
  if constexpr (Bits == 4) return low;
  const ByteVec high = vector(Bits == 5 ? 4 : 4 + j / 4);
  const int bit = Bits == 5 ? j : 2 * (j % 4);  // where the code's upper bits begin in a byte
  const ByteVec placed = bit < 4 ? (ByteVec)((ShortVec)high << (4 - bit)) : shifted_right(high, bit - 4);
  constexpr uint8_t mask = Bits == 5 ? 16 : 48;
  return low | (placed & mask);
}

#if defined(__AVX512VNNI__)
IntVec add_products(IntVec sum, ByteVec w, ByteVec x) {
  return (IntVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
}
#elif defined(__AVXVNNI__)
IntVec add_products(IntVec sum, ByteVec w, ByteVec x) {
  return (IntVec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
}
#elif defined(__AVX2__)
IntVec add_products(IntVec sum, ByteVec, ByteVec) { return sum; }  // not called without VNNI
#endif

#if defined(__AVX2__)
#if defined(__AVX512BW__)
ShortVec pairs(ByteVec w, ByteVec x) { return (ShortVec)_mm512_maddubs_epi16((__m512i)w, (__m512i)x); }
IntVec add_pairs(ShortVec v) {
  return (IntVec)_mm512_madd_epi16((__m512i)v, _mm512_set1_epi16(1));
}
ByteVec magnitude(ByteVec w) { return (ByteVec)_mm512_abs_epi8((__m512i)w); }
ByteVec with_sign_of(ByteVec x, ByteVec w) {
  const __mmask64 negative = _mm512_movepi8_mask((__m512i)w);
  return (ByteVec)_mm512_mask_sub_epi8((__m512i)x, negative, _mm512_setzero_si512(), (__m512i)x);
}
#else
ShortVec pairs(ByteVec w, ByteVec x) { return (ShortVec)_mm256_maddubs_epi16((__m256i)w, (__m256i)x); }
IntVec add_pairs(ShortVec v) {
  return (IntVec)_mm256_madd_epi16((__m256i)v, _mm256_set1_epi16(1));
}
ByteVec magnitude(ByteVec w) { return (ByteVec)_mm256_abs_epi8((__m256i)w); }
ByteVec with_sign_of(ByteVec x, ByteVec w) {
  return (ByteVec)_mm256_sign_epi8((__m256i)x, (__m256i)w);
}
#endif
#endif

// Add the products of codes and x over inputs 4 * First to 4 * Last - 1 to sum[r], for R rows; exact.
template <int Bits, int First, int Last, int R>
void dot(const uint8_t* codes, const int8_t* x, int64_t inputs, IntVec* sum) {
  const auto quad = [&](int r, int j) {
    return (ByteVec)(load_as<int32_t>(x + r * inputs + 4 * j) - IntVec{});
  };
#if defined(__AVX2__)
  if constexpr (kHasVnni) {
#pragma GCC unroll 8
    for (int j = First; j < Last; j++) {
      const ByteVec w = codes_at<Bits>(codes, j);
      for (int r = 0; r < R; r++) sum[r] = add_products(sum[r], w, quad(r, j));
    }
  } else if constexpr (Bits == 8) {
#pragma GCC unroll 8
    for (int j = First; j < Last; j++) {
      const ByteVec w = codes_at<Bits>(codes, j), size = magnitude(w);
      for (int r = 0; r < R; r++) sum[r] += add_pairs(pairs(size, with_sign_of(quad(r, j), w)));
    }
  } else {
    constexpr int fit = Bits == 4 ? 8 : Bits == 5 ? 4 : 2;  // products of pairs that fit in 16 bits
#pragma GCC unroll 8
    for (int j = First; j < Last; j += fit) {
      ShortVec part[R] = {};
#pragma GCC unroll 8
      for (int i = j; i < j + fit && i < Last; i++) {
        const ByteVec w = codes_at<Bits>(codes, i);
        for (int r = 0; r < R; r++) part[r] += pairs(w, quad(r, i));
      }
      for (int r = 0; r < R; r++) sum[r] += add_pairs(part[r]);
    }
  }
#else
  for (int j = First; j < Last; j++) {
    const ByteVec w = codes_at<Bits>(codes, j);
    for (int r = 0; r < R; r++)
      for (int lane = 0; lane < kWidth; lane++)
        for (int i = 0; i < 4; i++) sum[r][lane] += w[4 * lane + i] * x[r * inputs + 4 * j + i];
  }
#endif
}

// The scales of one step for vector v of outputs, from the panel's header and the scales of the step.
template <Kind K>
struct StepScales {
  static constexpr Layout layout = layout_of(K);
  Vec scale, other;  // other: the minimum; with kHalves the scale of the second half

  StepScales(const uint8_t* header, const uint8_t* step, int v) {
    const int at = v * kWidth;
    if constexpr (layout.scales == Scales::kHalf) {
      scale = halves(step + 2 * at);
    } else if constexpr (layout.scales == Scales::kMinimum) {
      scale = halves(step + 2 * at);
      other = halves(step + 2 * (kPanel + at));
    } else if constexpr (layout.scales == Scales::kSmall) {
      scale = halves(header + 2 * at) * bytes_as_floats<uint8_t>(step + at);
      other = -halves(header + 2 * (kPanel + at)) * bytes_as_floats<uint8_t>(step + kPanel + at);
    } else if constexpr (layout.scales == Scales::kHalves) {
      const Vec block = halves(header + 2 * at);
      scale = block * bytes_as_floats<int8_t>(step + at);
      other = block * bytes_as_floats<int8_t>(step + kPanel + at);
    } else {
      scale = load_as<Vec>(header + 4 * at);
    }
  }

  // Add the products of a step to sum[r * stride] for R rows.
  template <int R>
  void add(Vec* sum, int64_t stride, const uint8_t* stored, const int8_t* x, const Activation* group,
           int64_t inputs) const {
    const int64_t groups = inputs / kGroup;
    const auto start = [](int32_t codes) { return -layout.offset * codes - IntVec{}; };
    const auto floats = [](IntVec v) { return __builtin_convertvector(v, Vec); };
    IntVec codes[R];
    if constexpr (layout.scales == Scales::kHalves) {
      for (int r = 0; r < R; r++) codes[r] = start(group[r * groups].sum[0]);
      dot<layout.bits, 0, kQuads / 2, R>(stored, x, inputs, codes);
      for (int r = 0; r < R; r++) {
        Vec& to = sum[r * stride];
        to = multiply_add(floats(codes[r]), scale * group[r * groups].scale, to);
        codes[r] = start(group[r * groups].sum[1]);
      }
      dot<layout.bits, kQuads / 2, kQuads, R>(stored, x, inputs, codes);
      for (int r = 0; r < R; r++) {
        Vec& to = sum[r * stride];
        to = multiply_add(floats(codes[r]), other * group[r * groups].scale, to);
      }
    } else {
      for (int r = 0; r < R; r++) codes[r] = start(group[r * groups].sum[0] + group[r * groups].sum[1]);
      dot<layout.bits, 0, kQuads, R>(stored, x, inputs, codes);
      for (int r = 0; r < R; r++) {
        Vec& to = sum[r * stride];
        to = multiply_add(floats(codes[r]), scale * group[r * groups].scale, to);
        if constexpr (layout.scales == Scales::kMinimum || layout.scales == Scales::kSmall)
          to = multiply_add(other, splat(group[r * groups].total), to);
      }
    }
  }
};

template <Kind K, int R>
void multiply_rows(const Activations& x, int64_t first, const Panel& panel, float* out) {
  const int64_t inputs = panel.inputs;
  constexpr Layout layout = layout_of(K);
  constexpr int64_t vector = layout.codes() * kWidth;  // bytes of a vector's codes
  const int64_t steps = inputs / kGroup, in_block = layout.steps(panel.group);
  const uint8_t *header = panel.data, *at = panel.data;
  const int8_t* codes = x.codes(first);
  const Activation* groups = x.groups(first);
  Vec sum[R][kVecs] = {};
  for (int64_t step = 0, left = 0; step < steps; step++, left--) {
    if (left == 0) {
      header = at;
      at += layout.header() * kPanel;
      left = in_block;
    }
    const uint8_t* stored = at + layout.step() * kPanel;
    constexpr int64_t bytes = (layout.step() + layout.codes()) * kPanel;
    for (int64_t line = 0; panel.hints && line < bytes; line += 64)
      __builtin_prefetch(at + kAhead + line);
    // Without this, GCC unrolls two steps and keeps the sums in memory: one row takes 1.5 times as long.
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; v++) {
      const StepScales<K> scales(header, at, v);
      scales.template add<R>(&sum[0][v], kVecs, stored + v * vector, codes + step * kGroup,
                             groups + step, inputs);
    }
    at = stored + layout.codes() * kPanel;
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < kVecs; v++) store(out + r * kPanel + v * kWidth, sum[r][v]);
}

template <Kind K>
void multiply_kind(const Activations& x, int64_t first, int64_t count, const Panel& panel, float* out) {
  using Multiply = void (*)(const Activations&, int64_t, const Panel&, float*);
  constexpr Multiply by_rows[kRows] = {multiply_rows<K, 1>, multiply_rows<K, 2>, multiply_rows<K, 3>,
                                       multiply_rows<K, 4>, multiply_rows<K, 5>, multiply_rows<K, 6>};
  by_rows[count - 1](x, first, panel, out);
}

bool is_finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

// Write a step of a row as output c of a panel; returns false if a scale is not finite.
bool fill_step(const FileRow& row, const Layout& layout, int64_t step, int64_t in_block, int64_t c,
               uint8_t* header, uint8_t* scales, uint8_t* codes) {
  Codes read{};
  read_codes(row, step, &read);
  const int64_t v = c / kWidth, lane = c % kWidth;
  uint8_t* vectors = codes + v * layout.codes() * kWidth + 4 * lane;
  const auto merge = [&](int64_t vector, uint32_t four) {  // codes of four inputs, a byte each
    uint8_t* cell = vectors + vector * sizeof(ByteVec);
    four |= load_as<uint32_t>(cell);
    std::memcpy(cell, &four, sizeof four);
  };
  for (int64_t j = 0; j < kQuads; j++) {
    const auto four = load_as<uint32_t>(read.code + 4 * j);
    if (layout.bits == 8) {
      merge(j, kSignedBytes ? four ^ 0x80808080u : four);
      continue;
    }
    merge(j % 4, (four & 0x0f0f0f0fu) << (j < 4 ? 0 : 4));
    if (layout.bits == 5) merge(4, (four >> 4 & 0x01010101u) << j);
    if (layout.bits == 6) merge(4 + j / 4, (four >> 4 & 0x03030303u) << 2 * (j % 4));
  }
  if (layout.scales == Scales::kWide) {
    std::memcpy(header + 4 * c, row.scales + step / in_block, 4);
    return true;  // these scales were checked when the file was read
  }
  const BlockScales block = read_scales(row, step);
  uint8_t* whole = layout.header() ? header : scales;
  std::memcpy(whole + 2 * c, &block.scale, 2);
  if (layout.scales == Scales::kMinimum || layout.scales == Scales::kSmall)
    std::memcpy(whole + 2 * (kPanel + c), &block.minimum, 2);
  if (layout.header()) {
    scales[c] = read.scale;
    scales[kPanel + c] = read.minimum;
  }
  return is_finite(block.scale) && is_finite(block.minimum);
}
}  // namespace

void Activations::round(const float* x, int64_t rows, int64_t inputs) {
  inputs_ = inputs;
  const int64_t groups = inputs / kGroup;
  // Two checks, since an earlier call may have failed between the two lines.
  if (static_cast<int64_t>(codes_.size()) < rows * inputs) codes_.resize(rows * inputs);
  if (static_cast<int64_t>(groups_.size()) < rows * groups) groups_.resize(rows * groups);
  parallel_for(rows, rows * inputs > 20000, [&](int64_t row) {
    for (int64_t g = row * groups; g < (row + 1) * groups; g++) round_group(x, g);
  });
}

void Activations::round_group(const float* x, int64_t g) {
  typedef int8_t Narrow __attribute__((vector_size(kWidth)));
  const float* from = x + g * kGroup;
  Vec most = {}, nan = {};
  for (int i = 0; i < kGroup; i += kWidth) {
    const Vec v = load(from + i);
    most = max(most, (Vec)((BitVec)v & 0x7fffffffu));
    nan += v * 0.0f;  // NaN if v is NaN or infinite, else 0
  }
  const float largest = max_lane(most), inverse = largest > kLeast ? 127.0f / largest : 0.0f;
  Activation& group = groups_[g];
  int8_t* codes = codes_.data() + g * kGroup;
  if (const float any_nan = sum_lanes(nan); any_nan != 0.0f) {  // codes cannot hold a NaN
    std::memset(codes, 0, kGroup);
    group = {any_nan, any_nan, {0, 0}};
    return;
  }
  for (int half = 0; half < 2; half++) {
    IntVec sum = {};
    for (int at = half * kGroup / 2; at < (half + 1) * kGroup / 2; at += kWidth) {
      const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
      const Vec rounded = multiply_add(load(from + at), splat(inverse), magic) - magic;
      const IntVec code = __builtin_convertvector(rounded, IntVec);
      const Narrow narrow = __builtin_convertvector(code, Narrow);
      std::memcpy(codes + at, &narrow, sizeof narrow);
      sum += code;
    }
    int32_t lanes[kWidth];
    std::memcpy(lanes, &sum, sizeof sum);
    group.sum[half] = 0;
    for (const int32_t lane : lanes) group.sum[half] += lane;
  }
  group.scale = largest / 127.0f;
  group.total = group.scale * static_cast<float>(group.sum[0] + group.sum[1]);
}

int64_t panel_bytes(Kind kind, int64_t inputs, int64_t group, int64_t outputs) {
  const Layout layout = layout_of(kind);
  const int64_t steps = inputs / kGroup;
  return outputs * (steps / layout.steps(group) * layout.header() +
                    steps * (layout.step() + layout.codes()));
}

bool fill_panel(Kind kind, const FileRow* rows, int64_t inputs, int64_t group, uint8_t* panel) {
  const Layout layout = layout_of(kind);
  const int64_t in_block = layout.steps(group);
  uint8_t *header = panel, *at = panel;
  bool finite = true;
  for (int64_t step = 0; step < inputs / kGroup; step++) {
    if (step % in_block == 0) {
      header = at;
      at += layout.header() * kPanel;
    }
    uint8_t* codes = at + layout.step() * kPanel;
    for (int64_t c = 0; c < kPanel; c++)
      if (rows[c].data) finite &= fill_step(rows[c], layout, step, in_block, c, header, at, codes);
    at = codes + layout.codes() * kPanel;
  }
  return finite;
}

void multiply_panel(const Activations& x, int64_t first, int64_t count, const Panel& panel, float* out) {
  switch (panel.kind) {
    case kQ8_0: return multiply_kind<kQ8_0>(x, first, count, panel, out);
    case kQ4_0: return multiply_kind<kQ4_0>(x, first, count, panel, out);
    case kQ4_1: return multiply_kind<kQ4_1>(x, first, count, panel, out);
    case kQ5_0: return multiply_kind<kQ5_0>(x, first, count, panel, out);
    case kQ5_1: return multiply_kind<kQ5_1>(x, first, count, panel, out);
    case kQ4_K: return multiply_kind<kQ4_K>(x, first, count, panel, out);
    case kQ5_K: return multiply_kind<kQ5_K>(x, first, count, panel, out);
    case kQ6_K: return multiply_kind<kQ6_K>(x, first, count, panel, out);
    case kInt8: return multiply_kind<kInt8>(x, first, count, panel, out);
    default: return multiply_kind<kInt4>(x, first, count, panel, out);
  }
}
}  // namespace foretoken
