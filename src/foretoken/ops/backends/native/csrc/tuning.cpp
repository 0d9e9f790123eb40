#include "tuning.h"

#include <algorithm>
#include <chrono>

namespace foretoken {
namespace {

constexpr int64_t kMost = int64_t{256} << 20;  // bytes: more than most caches hold
constexpr double kBudget = 0.015;              // seconds after which two rounds are enough
constexpr int kRounds = 5;
constexpr double kClearly = 0.97;  // of the ordinary hint's time: enough to leave it
constexpr double kHopeless = 1.5;  // times the best: not measured again

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
  int winner = 0;
  double spent = 0;
  bool hopeless[kFetches] = {};
  for (int round = 0; round < 2 || (round < kRounds && spent < kBudget); round++) {
    for (int f = 0; f < kFetches; f++) {
      if (hopeless[f]) continue;
      const double first = pass.seconds(Fetch{f});
      const double timed = pass.seconds(Fetch{f});
      spent += first + timed;
      best[f] = round ? std::min(best[f], timed) : timed;
      if (best[f] < best[winner]) winner = f;
      hopeless[f] = std::min(first, timed) > kHopeless * best[winner];
    }
  }
  const bool clear = best[winner] < kClearly * best[static_cast<int>(Fetch::kCached)];
  return clear ? Fetch{winner} : Fetch::kCached;
}

}  // namespace

Fetches measure_fetches(const std::vector<const Packed*>& weights, double seconds[2][kFetches]) {
  const Fetch one = fastest(Pass(weights, 1), seconds[0]);
  return {one, fastest(Pass(weights, kRows), seconds[1])};
}

}  // namespace foretoken
