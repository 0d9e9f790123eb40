#include "gemm.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
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
  if constexpr (F == Fetch::kHint) __builtin_prefetch(at + kAhead);
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

// R rows of x times P adjacent panels, into out[R][P][kPanel].
template <int R, int P, Store S, Fetch F>
void multiply_tile(const float* x, int64_t inputs, const float* panel, float* out) {
  constexpr int64_t row = S == Store::kHalf ? kPanel / 2 : kPanel;
  Vec sum[R][P][kVecs] = {};
  for (int64_t k = 0; k < inputs; k++) {
    Vec w[P][kVecs];
    for (int i = 0; i < P; i++) load_weights<S, F>(panel + i * inputs * row, k, w[i]);
    for (int r = 0; r < R; r++) {
      const Vec a = splat(x[r * inputs + k]);
      for (int i = 0; i < P; i++)
        for (int v = 0; v < kVecs; v++) sum[r][i][v] += a * w[i][v];
    }
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < P; i++)
      for (int v = 0; v < kVecs; v++) store(out + (r * P + i) * kPanel + v * kWidth, sum[r][i][v]);
}

using Multiply = void (*)(const float*, int64_t, const float*, float*);

template <Store S, Fetch F>
constexpr Multiply kByRows[kRows] = {
    multiply_tile<1, 1, S, F>, multiply_tile<2, 1, S, F>, multiply_tile<3, 1, S, F>,
    multiply_tile<4, 1, S, F>, multiply_tile<5, 1, S, F>, multiply_tile<6, 1, S, F>};

template <Store S>
constexpr const Multiply* kByFetch[kFetches] = {kByRows<S, Fetch::kNoHint>,
                                                kByRows<S, Fetch::kHint>};

}  // namespace

void multiply_pair(const float* x, const Packed& w, int64_t p, float* out) {
  const auto run = w.store == Store::kHalf ? multiply_tile<1, 2, Store::kHalf, Fetch::kNoHint>
                                           : multiply_tile<1, 2, Store::kFloat, Fetch::kNoHint>;
  run(x, w.inputs, w.panel(p), out);
}

void multiply(const float* x, int rows, const Packed& w, int64_t p, float* out, Fetch fetch) {
  const auto& by_fetch = w.store == Store::kHalf ? kByFetch<Store::kHalf> : kByFetch<Store::kFloat>;
  by_fetch[static_cast<int>(fetch)][rows - 1](x, w.inputs, w.panel(p), out);
}

namespace {

constexpr int64_t kMost = int64_t{256} << 20;  // bytes: more than most caches hold
constexpr double kBudget = 0.015;              // seconds after which two rounds are enough
constexpr int kRounds = 5;
constexpr double kClearly = 0.97;  // of the ordinary hint's time: enough to do without

// Multiplies as a forward pass does, without what is between the products.
class Pass {
 public:
  Pass(const std::vector<const Packed*>& weights, int rows) : rows_(rows) {
    int64_t bytes = 0, widest = 0;
    for (const Packed* w : weights) {
      if (bytes >= kMost) break;
      weights_.push_back(w);
      bytes += w->bytes();
      widest = std::max(widest, w->inputs);
    }
    x_.assign(rows * widest, 1.0f);
  }

  double seconds(Fetch fetch) {
    const auto start = std::chrono::steady_clock::now();
    for (const Packed* w : weights_)
      product(x_.data(), rows_, *w, {fetch, fetch}, [](int64_t, int64_t, int64_t, const float*) {});
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

 private:
  std::vector<const Packed*> weights_;
  std::vector<float> x_;
  int rows_;
};

// In turns, so that a busy moment of the machine meets all alike; the best of each counts. The first
// pass of a turn is not timed: it leaves the caches as passes of its kind do.
Fetch fastest(Pass pass, double* best) {
  double spent = 0;
  for (int round = 0; round < 2 || (round < kRounds && spent < kBudget); round++) {
    for (int f = 0; f < kFetches; f++) {
      spent += pass.seconds(Fetch{f});
      const double timed = pass.seconds(Fetch{f});
      spent += timed;
      best[f] = round ? std::min(best[f], timed) : timed;
    }
  }
  return best[0] < kClearly * best[1] ? Fetch::kNoHint : Fetch::kHint;
}

}  // namespace

Fetches measure_fetches(const std::vector<const Packed*>& weights, double seconds[2][kFetches]) {
  const Fetch one = fastest(Pass(weights, 1), seconds[0]);
  return {one, fastest(Pass(weights, kRows), seconds[1])};
}

}  // namespace foretoken
