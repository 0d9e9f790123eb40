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

Packed::Packed(int64_t outputs, int64_t inputs, Store store, Arena& arena)
    : outputs(outputs),
      inputs(inputs),
      panels((outputs + kPanel - 1) / kPanel),
      store(store),
      weights_(arena.take(size(outputs, inputs, store))) {}

void Packed::fill(int64_t first, const float* weight, const float* given_bias, int64_t count) {
  for (int64_t n = 0; n < count; n++) {
    const int64_t p = (first + n) / kPanel, c = (first + n) % kPanel;
    float* panel = weights_ + p * inputs * row(store);
    const int64_t pair = c / (2 * kWidth), lane = c % kWidth, upper = c / kWidth % 2;
    for (int64_t k = 0; k < inputs; k++) {
      if (store == Store::kFloat) {
        panel[k * kPanel + c] = weight[n * inputs + k];
      } else {
        float* word = panel + k * kPanel / 2 + pair * kWidth + lane;
        uint32_t bits, joined;
        std::memcpy(&bits, weight + n * inputs + k, sizeof bits);
        std::memcpy(&joined, word, sizeof joined);
        joined |= upper ? bits : bits >> 16;
        std::memcpy(word, &joined, sizeof joined);
      }
    }
  }
  if (!given_bias) return;
  bias.resize(outputs);
  for (int64_t n = 0; n < count; n++) bias[first + n] = given_bias[n];
}

namespace {

// Floats between what is read and what is fetched meanwhile; past the end of a panel begins the next.
// Nearer and farther were slower for six rows (decision 013).
constexpr int64_t kAhead = 16384 / sizeof(float);

template <Fetch F>
Vec fetch_and_load(const float* at) {
  if constexpr (F == Fetch::kCached) __builtin_prefetch(at + kAhead, 0, 3);
  if constexpr (F == Fetch::kPastCaches) __builtin_prefetch(at + kAhead, 0, 0);
  return load(at);
}

// The weights of input k and a panel's outputs.
template <Store S, Fetch F>
void load_weights(const float* panel, int64_t k, Vec* w) {
  if constexpr (S == Store::kFloat) {
    for (int v = 0; v < kVecs; v++) w[v] = fetch_and_load<F>(panel + k * kPanel + v * kWidth);
  } else {
    for (int v = 0; v < kVecs; v += 2) {
      const BitVec bits = (BitVec)fetch_and_load<F>(panel + k * kPanel / 2 + v / 2 * kWidth);
      w[v] = (Vec)(bits << 16);
      w[v + 1] = (Vec)(bits & 0xffff0000u);
    }
  }
}

template <int R, Store S, Fetch F>
void multiply_rows(const float* x, int64_t inputs, const float* panel, float* out) {
  Vec sum[R][kVecs] = {};
  for (int64_t k = 0; k < inputs; k++) {
    Vec w[kVecs];
    load_weights<S, F>(panel, k, w);
    for (int r = 0; r < R; r++) {
      const Vec a = splat(x[r * inputs + k]);
      for (int v = 0; v < kVecs; v++) sum[r][v] += a * w[v];
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < kVecs; v++) store(out + r * kPanel + v * kWidth, sum[r][v]);
}

template <Store S>
void multiply_two(const float* x, int64_t inputs, const float* panel, const float* next,
                  float* out) {
  Vec sum[2][kVecs] = {};
  for (int64_t k = 0; k < inputs; k++) {
    const Vec a = splat(x[k]);
    for (int i = 0; i < 2; i++) {
      Vec w[kVecs];
      load_weights<S, Fetch::kNoHint>(i ? next : panel, k, w);
      for (int v = 0; v < kVecs; v++) sum[i][v] += a * w[v];
    }
  }
  for (int i = 0; i < 2; i++)
    for (int v = 0; v < kVecs; v++) store(out + i * kPanel + v * kWidth, sum[i][v]);
}

using Multiply = void (*)(const float*, int64_t, const float*, float*);

template <Store S, Fetch F>
constexpr Multiply kByRows[kRows] = {
    multiply_rows<1, S, F>, multiply_rows<2, S, F>, multiply_rows<3, S, F>,
    multiply_rows<4, S, F>, multiply_rows<5, S, F>, multiply_rows<6, S, F>};

template <Store S>
constexpr const Multiply* kByFetch[kFetches] = {
    kByRows<S, Fetch::kNoHint>, kByRows<S, Fetch::kCached>, kByRows<S, Fetch::kPastCaches>};

}  // namespace

void multiply_pair(const float* x, const Packed& w, int64_t p, float* out) {
  const auto run = w.store == Store::kHalf ? multiply_two<Store::kHalf> : multiply_two<Store::kFloat>;
  run(x, w.inputs, w.panel(p), w.panel(p + 1), out);
}

void multiply(const float* x, int rows, const Packed& w, int64_t p, float* out, Fetch fetch) {
  const auto& by_fetch = w.store == Store::kHalf ? kByFetch<Store::kHalf> : kByFetch<Store::kFloat>;
  by_fetch[static_cast<int>(fetch)][rows - 1](x, w.inputs, w.panel(p), out);
}

}  // namespace foretoken
