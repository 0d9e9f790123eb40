#include "gemm.h"
#include <sys/mman.h>
#include <algorithm>
#include <chrono>

namespace foretoken {
// Pages from the system: they are zero, and are created by the threads that write the weights.
Arena::Arena(int64_t bytes) : size_(bytes + kHuge) {
  void* mapped = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  mapped_ = static_cast<uint8_t*>(mapped);
  const auto at = reinterpret_cast<uintptr_t>(mapped);
  taken_ = static_cast<int64_t>((at + kHuge - 1) / kHuge * kHuge - at);
#ifdef MADV_HUGEPAGE
  madvise(mapped_ + taken_, bytes, MADV_HUGEPAGE);  // if this fails, pages are small
#endif
}

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(mapped_, other.mapped_);
  std::swap(size_, other.size_);
  std::swap(taken_, other.taken_);
  return *this;
}

Arena::~Arena() {
  if (mapped_) munmap(mapped_, size_);
}

uint8_t* Arena::take(int64_t bytes) {
  uint8_t* at = mapped_ + taken_;
  taken_ += padded(bytes);
  return at;
}

Packed::Packed(int64_t outputs, int64_t inputs, Kind kind, int64_t group, Arena& arena)
    : outputs(outputs), inputs(inputs), panels((outputs + kPanel - 1) / kPanel), group(group),
      kind(kind), weights_(arena.take(size(outputs, inputs, kind, group))) {}

bool Packed::fill_panel(int64_t p, const FileRow* rows) {
  uint8_t* panel = weights_ + p * panel_size(inputs, kind, group);
  if (!is_plain()) return foretoken::fill_panel(kind, rows, inputs, group, panel);
  constexpr int64_t piece = 64;  // inputs at a time: their part of the panel stays in the L1 cache
  const uint64_t size = kind == kF32 ? 4 : 2;
  for (int64_t k0 = 0; k0 < inputs; k0 += piece) {
    const int64_t count = std::min(piece, inputs - k0);
    for (int64_t c = 0; c < kPanel; c++) {
      if (!rows[c].data) continue;
      const int64_t pair = c / (2 * kWidth), lane = c % kWidth, upper = c / kWidth % 2;
      // From a float32 that is packed as bfloat16, the upper half is read.
      const uint64_t stored = rows[c].kind == kF32 ? 4 : 2, skipped = stored - size;
      for (int64_t k = k0; k < k0 + count; k++) {
        int64_t place = k * kPanel + c;
        if (kind == kBF16) place = k * kPanel + 2 * (pair * kWidth + lane) + upper;
        std::memcpy(panel + place * size, rows[c].data + k * stored + skipped, size);
      }
    }
  }
  return true;  // plain numbers have no scales
}

Activations& rounded(const float* x, int64_t rows, int64_t inputs) {
  thread_local Activations activations;
  activations.round(x, rows, inputs);
  return activations;
}

namespace {
// Floats from a load to its prefetch: the fastest distance for six rows (decision 013).
constexpr int64_t kAhead = 16384 / sizeof(float);

template <Fetch F>
Vec fetch_and_load(const float* at) {
  if constexpr (F == Fetch::kHint) __builtin_prefetch(at + kAhead);
  return load(at);
}

template <Kind S, Fetch F>
void load_weights(const float* panel, int64_t k, Vec* w) {
  if constexpr (S == kF32) {
    for (int v = 0; v < kVecs; v++) w[v] = fetch_and_load<F>(panel + k * kPanel + v * kWidth);
  } else if constexpr (S == kF16) {
    for (int v = 0; v < kVecs; v++) {
      HalfVec halves;
      std::memcpy(&halves, panel + (k * kPanel + v * kWidth) / 2, sizeof halves);
      w[v] = from_halves(halves);
    }
  } else {
    for (int v = 0; v < kVecs; v += 2) {
      const BitVec bits = (BitVec)fetch_and_load<F>(panel + k * kPanel / 2 + v / 2 * kWidth);
      w[v] = (Vec)(bits << 16);
      w[v + 1] = (Vec)(bits & 0xffff0000u);
    }
  }
}

// R rows of x times P adjacent panels, into out[R][P][kPanel].
template <int R, int P, Kind S, Fetch F>
void multiply_tile(const float* x, int64_t inputs, const uint8_t* bytes, float* out) {
  constexpr int64_t row = S == kF32 ? kPanel : kPanel / 2;
  const auto* panel = reinterpret_cast<const float*>(bytes);
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

using Multiply = void (*)(const float*, int64_t, const uint8_t*, float*);

template <Kind S, Fetch F>
constexpr Multiply kByRows[kRows] = {
    multiply_tile<1, 1, S, F>, multiply_tile<2, 1, S, F>, multiply_tile<3, 1, S, F>,
    multiply_tile<4, 1, S, F>, multiply_tile<5, 1, S, F>, multiply_tile<6, 1, S, F>};

template <Kind S>
constexpr const Multiply* kByFetch[kFetches] = {kByRows<S, Fetch::kNoHint>, kByRows<S, Fetch::kHint>};

constexpr const Multiply* const* kByKind[] = {kByFetch<kF32>, kByFetch<kBF16>, kByFetch<kF16>};
constexpr Multiply kPair[] = {multiply_tile<1, 2, kF32, Fetch::kNoHint>,
                              multiply_tile<1, 2, kBF16, Fetch::kNoHint>,
                              multiply_tile<1, 2, kF16, Fetch::kNoHint>};
}  // namespace

void multiply_pair(const float* x, const Packed& w, int64_t p, float* out) {
  kPair[w.kind](x, w.inputs, w.panel(p), out);
}

void multiply(const float* x, int rows, const Packed& w, int64_t p, float* out, Fetch fetch) {
  kByKind[w.kind][static_cast<int>(fetch)][rows - 1](x, w.inputs, w.panel(p), out);
}

namespace {
constexpr int64_t kMostBytes = int64_t{256} << 20;  // more than most caches hold
constexpr double kBudget = 0.015;                   // seconds after which two rounds are enough
constexpr int kRounds = 5;
constexpr double kMostOfHints = 0.97;  // of the time with hints: no hints if faster than that

// The products of a forward pass, without the work between them.
class Pass {
 public:
  Pass(const std::vector<const Packed*>& weights, int rows) : rows_(rows) {
    int64_t bytes = 0, widest = 0;
    for (const Packed* w : weights) {
      if (bytes >= kMostBytes) break;
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

// The faster `Fetch` by its best time. They take turns, each after a pass that fills the caches.
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
  return best[0] < kMostOfHints * best[1] ? Fetch::kNoHint : Fetch::kHint;
}
}  // namespace

Fetches measure_fetches(const std::vector<const Packed*>& weights, double seconds[2][kFetches]) {
  const Fetch one = fastest(Pass(weights, 1), seconds[0]);
  return {one, fastest(Pass(weights, kRows), seconds[1])};
}
}  // namespace foretoken
