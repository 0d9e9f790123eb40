#include "gemm.h"

#include <sys/mman.h>

#include <cstdlib>
#include <new>

namespace foretoken {

Arena::Arena(int64_t floats) {
  constexpr size_t huge = size_t{2} << 20;
  const size_t bytes = (floats * sizeof(float) + huge - 1) / huge * huge;
  memory_.reset(static_cast<float*>(std::aligned_alloc(huge, bytes)));
  if (!memory_) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  madvise(memory_.get(), bytes, MADV_HUGEPAGE);  // a wish: where it is refused pages are small
#endif
  std::memset(memory_.get(), 0, bytes);
}

void Arena::Free::operator()(float* memory) const { std::free(memory); }

float* Arena::take(int64_t floats) {
  float* at = memory_.get() + taken_;
  taken_ += padded(floats);
  return at;
}

Packed::Packed(int64_t outputs, int64_t inputs, Arena& arena)
    : outputs(outputs),
      inputs(inputs),
      panels((outputs + kPanel - 1) / kPanel),
      weights_(arena.take(size(outputs, inputs))) {}

void Packed::fill(int64_t first, const float* weight, const float* given_bias, int64_t count) {
  for (int64_t n = 0; n < count; n++) {
    float* column = weights_ + (first + n) / kPanel * inputs * kPanel + (first + n) % kPanel;
    for (int64_t k = 0; k < inputs; k++) column[k * kPanel] = weight[n * inputs + k];
  }
  if (!given_bias) return;
  bias.resize(outputs);
  for (int64_t n = 0; n < count; n++) bias[first + n] = given_bias[n];
}

namespace {

// Floats between what is read and what is fetched meanwhile; past the end of a panel begins the next.
// Nearer and farther were slower for six rows (decision 013).
constexpr int64_t kAhead = 16384 / sizeof(float);

template <int R, Fetch F>
void multiply_rows(const float* x, int64_t inputs, const float* panel, float* out) {
  Vec sum[R][kVecs] = {};
  for (int64_t k = 0; k < inputs; k++) {
    Vec w[kVecs];
    for (int v = 0; v < kVecs; v++) {
      const float* at = panel + k * kPanel + v * kWidth;
      if constexpr (F == Fetch::kCached) __builtin_prefetch(at + kAhead, 0, 3);
      if constexpr (F == Fetch::kPastCaches) __builtin_prefetch(at + kAhead, 0, 0);
      w[v] = load(at);
    }
    for (int r = 0; r < R; r++) {
      const Vec a = splat(x[r * inputs + k]);
      for (int v = 0; v < kVecs; v++) sum[r][v] += a * w[v];
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < kVecs; v++) store(out + r * kPanel + v * kWidth, sum[r][v]);
}

using Multiply = void (*)(const float*, int64_t, const float*, float*);

template <Fetch F>
constexpr Multiply kByRows[kRows] = {multiply_rows<1, F>, multiply_rows<2, F>, multiply_rows<3, F>,
                                     multiply_rows<4, F>, multiply_rows<5, F>, multiply_rows<6, F>};

constexpr const Multiply* kByFetch[kFetches] = {
    kByRows<Fetch::kNoHint>, kByRows<Fetch::kCached>, kByRows<Fetch::kPastCaches>};

}  // namespace

void multiply_pair(const float* x, int64_t inputs, const float* panel, float* out) {
  const float* next = panel + inputs * kPanel;
  Vec sum[2][kVecs] = {};
  for (int64_t k = 0; k < inputs; k++) {
    const Vec a = splat(x[k]);
    for (int v = 0; v < kVecs; v++) {
      sum[0][v] += a * load(panel + k * kPanel + v * kWidth);
      sum[1][v] += a * load(next + k * kPanel + v * kWidth);
    }
  }
  for (int i = 0; i < 2; i++)
    for (int v = 0; v < kVecs; v++) store(out + i * kPanel + v * kWidth, sum[i][v]);
}

void multiply(const float* x, int64_t inputs, int rows, const float* panel, float* out,
              Fetch fetch) {
  kByFetch[static_cast<int>(fetch)][rows - 1](x, inputs, panel, out);
}

}  // namespace foretoken
