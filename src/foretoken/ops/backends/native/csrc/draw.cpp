// Gumbel-max draws: flat over tokens, or hierarchical over blocks and then the tokens of one block.
#include <algorithm>
#include "sampling.h"

namespace foretoken {
namespace {
// Whether any of 16 words is at most `limit`.
bool any_at_most(const uint32_t* word, uint32_t limit) {
  IntVec below = {};
  for (int i = 0; i < 16; i += kWidth) {
    BitVec w;
    std::memcpy(&w, word + i, sizeof w);
    below |= w <= limit + BitVec{};
  }
  return any(below);
}

constexpr float kLogBlock = 6.9314718f;  // log 1024
constexpr double kFewWords = 0x1p29;     // an eighth of all words is below it

// Noise at u = 0.99999. For larger u, FP32 does not resolve 1 - u, and this is only an upper bound. For
// smaller u, FP32 noise is off by 2.6e-4 at most, and a difference of scores by twice that.
constexpr float kLeastExact = -2.443f;
constexpr double kSlack = 6e-4;

// The words of 64 draws, in Philox's order.
struct Words {
  uint32_t raw[2][4][16];
  bool fp64;

  Words(int64_t first, const StreamName& name, bool wide) : fp64(wide) {
    words16(static_cast<uint32_t>(first / (wide ? 2 : 4)), name, raw[0]);
    if (wide) words16(static_cast<uint32_t>(first / 2) + 16, name, raw[1]);
  }

  // The word of a draw; in FP64 the first word, and the second.
  uint32_t high(int i) const { return fp64 ? raw[i / 32][i % 2 * 2][i / 2 % 16] : raw[0][i % 4][i / 4]; }
  uint32_t low(int i) const { return fp64 ? raw[i / 32][i % 2 * 2 + 1][i / 2 % 16] : 0; }
  double gumbel(int i) const {
    return foretoken::gumbel(fp64 ? uniform64(high(i), low(i)) : uniform32(high(i)));
  }

  // Whether `high` of any draw is at most `limit`.
  bool any_high_at_most(uint32_t limit) const {
    const auto& second = raw[fp64];
    return any_at_most(raw[0][0], limit) || any_at_most(raw[0][2], limit) ||
           any_at_most(fp64 ? second[0] : raw[0][1], limit) ||
           any_at_most(fp64 ? second[2] : raw[0][3], limit);
  }

  // The noise of all draws, in FP32.
  void noise(float* out) const {
    alignas(64) uint32_t h[64], l[64];
    for (int i = 0; i < 64; i++) h[i] = high(i), l[i] = low(i);
    for (int i = 0; i < 64; i += kWidth) {
      BitVec a, b;
      std::memcpy(&a, h + i, sizeof a);
      std::memcpy(&b, l + i, sizeof b);
      const Vec rest = fp64 ? __builtin_convertvector(b, Vec) * 0x1p-64f : splat(0x1p-33f);
      const Vec u = min(__builtin_convertvector(a, Vec) * 0x1p-32f + rest, splat(0.99999f));
      store(out + i, -log(-log1m(u)));
    }
  }
};

float peak64(const float* z) {
  Vec best = load(z);
  for (int i = kWidth; i < 64; i += kWidth) best = max(load(z + i), best);
  return max_lane(best);
}

// argmax(z + G_id) over the added ids, the lowest id on ties.
class GumbelArgmax {
 public:
  GumbelArgmax(const StreamName& name, bool fp64) : name_(name), fp64_(fp64) {}
  void add(float z, int64_t id) {
    if (z == kMinusInfinity) return;
    add_score(z + gumbel(uniform_at(id, name_, fp64_)), id);
  }
  // Add `count` ids from `first` on, both multiples of 64.
  void add(const float* z, int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; i += 64) add_64(z + i, first + i);
  }
  // Whether an id with this z cannot become the argmax: noise is below 38 in FP64, 23 in FP32.
  bool excludes(float z) const { return z + (fp64_ ? 38.0f : 23.0f) < score_; }
  double score() const { return score_; }
  int64_t id() const { return id_; }
  bool exists() const { return score_ > kLogZero; }  // whether any added z was not -inf

 private:
  // Large noise comes from small words: ids with too large words are excluded first. If these are too
  // few, ids are excluded by their FP32 scores. Exact scores are computed for the other ids.
  void add_64(const float* z, int64_t first) {
    const float peak = peak64(z);
    if (!(peak > kMinusInfinity)) return;
    const Words words(first, name_, fp64_);
    // z + G > score_ needs -log1p(-u) < e^(z - score_), hence u < e^(z - score_).
    const double limit = std::exp(peak - score_) * 4294967296.0 * 1.001 + 1;
    if (limit < kFewWords) {
      const auto most = static_cast<uint32_t>(limit);
      if (!words.any_high_at_most(most)) return;
      for (int i = 0; i < 64; i++)
        if (words.high(i) <= most && z[i] > kMinusInfinity) add_score(z[i] + words.gumbel(i), first + i);
      return;
    }
    alignas(64) float noise[64], score[64];
    words.noise(noise);
    Vec best = splat(kMinusInfinity);
    for (int i = 0; i < 64; i += kWidth) {
      const Vec g = load(noise + i), s = load(z + i) + g;
      store(score + i, s);
      best = max(g < splat(kLeastExact) ? splat(kMinusInfinity) : s, best);
    }
    const double highest = std::max(static_cast<double>(max_lane(best)), score_);
    const double least = highest - kSlack - 1e-6 * std::abs(highest);
    for (int i = 0; i < 64; i++)
      if (score[i] >= least && z[i] > kMinusInfinity) add_score(z[i] + words.gumbel(i), first + i);
  }
  void add_score(double score, int64_t id) {
    if (score > score_ || (score == score_ && id < id_)) score_ = score, id_ = id;
  }

  const StreamName name_;
  const bool fp64_;
  double score_ = kLogZero;
  int64_t id_ = 0;
};

struct ListedToken {
  float z;
  int64_t id;
};

// A draw from a short list, in which tokens of the same block are adjacent.
int64_t draw_listed(const std::vector<ListedToken>& list, const Noise& noise, int64_t size) {
  GumbelArgmax tokens(noise.token, noise.fp64);
  auto first = list.begin(), end = list.end();
  if (!noise.flat && size > kBlock) {
    GumbelArgmax blocks(noise.block, noise.fp64);
    for (auto from = first; from != end;) {
      double sum = 0;
      const int64_t j = from->id / kBlock;
      float top = kMinusInfinity;
      auto to = from;
      for (; to != end && to->id / kBlock == j; ++to) top = std::max(top, to->z);
      for (; from != to; ++from) sum += std::exp(static_cast<double>(from->z) - top);
      blocks.add(static_cast<float>(top + std::log(sum)), j);
    }
    while (first != end && first->id / kBlock != blocks.id()) ++first;
    for (end = first; end != list.end() && end->id / kBlock == blocks.id();) ++end;
  }
  for (; first != end; ++first) tokens.add(first->z, first->id);
  return tokens.id();
}

// This thread's memory for lists and masses of its current row.
thread_local std::vector<ListedToken> scratch_list;
thread_local std::vector<float> scratch_masses, scratch_noise;

// argmax of log-mass + noise over the blocks of a row, after `measure_peaks`. bound_J: upper bounds of
// the scores of blocks, first from 1024 times the largest token, then from `mass_bound`. Of 149 blocks
// of normal logits 18 get the second bound, and 4.5 are measured (decision 011).
int64_t draw_block(const Distribution& d, const Noise& noise) {
  std::vector<float>& bound_J = scratch_masses;
  std::vector<float>& gumbel_J = scratch_noise;
  bound_J.resize(d.peak_J.size());
  gumbel_J.resize(d.peak_J.size());
  for (size_t j = 0; j < bound_J.size(); j += 64) {
    Words(static_cast<int64_t>(j), noise.block, noise.fp64).noise(&gumbel_J[j]);
    for (size_t i = j; i < j + 64; i += kWidth) {
      store(&gumbel_J[i], load(&gumbel_J[i]) + 1e-3f);  // more than FP32's rounding error
      store(&bound_J[i], (load(&d.peak_J[i]) - d.top) * d.inverse + load(&gumbel_J[i]));
    }
  }
  GumbelArgmax blocks(noise.block, noise.fp64);
  const auto add = [&](int64_t j) {
    blocks.add(mass_of(d, j), j);
    bound_J[j] = kMinusInfinity;
  };
  const auto best = [&] { return std::max_element(bound_J.begin(), bound_J.end()) - bound_J.begin(); };
  add(best());
  for (int64_t j = 0; j < d.row.blocks(); j++)
    if (bound_J[j] > kMinusInfinity && bound_J[j] + kLogBlock > blocks.score()) {
      bound_J[j] = mass_bound(d, j) + gumbel_J[j];
    } else {
      bound_J[j] = kMinusInfinity;
    }
  for (int64_t j = best(); bound_J[j] > blocks.score(); j = best()) add(j);
  return blocks.id();
}

int64_t draw_within(const Distribution& d, int64_t j, const Noise& noise) {
  alignas(64) float z[kBlock];
  GumbelArgmax tokens(noise.token, noise.fp64);
  tokens.add(z, j * kBlock, d.scaled_block(j, z));
  return std::min(tokens.id(), d.row.size - 1);
}
}  // namespace

int64_t draw(const Distribution& d, const Noise& noise) {
  if (d.listed) {
    scratch_list.clear();
    for (const Token& t : d.kept) scratch_list.push_back({(t.logit - d.top) * d.inverse, t.id});
    return draw_listed(scratch_list, noise, d.row.size);
  }
  if (noise.flat) {
    alignas(64) float z[kBlock];
    GumbelArgmax tokens(noise.token, noise.fp64);
    for (int64_t j = 0; j < d.row.blocks(); j++)
      if (!tokens.excludes((d.peak_J[j] - d.top) * d.inverse))
        tokens.add(z, j * kBlock, d.scaled_block(j, z));
    return tokens.id();
  }
  if (d.row.blocks() == 1) return draw_within(d, 0, noise);
  GumbelArgmax blocks(noise.block, noise.fp64);
  blocks.add(d.mass_J.data(), 0, static_cast<int64_t>(d.mass_J.size()));
  return draw_within(d, std::min(blocks.id(), d.row.blocks() - 1), noise);
}

int64_t draw(const Row& row, const Filters& filters, const Noise& noise, Distribution& d) {
  if (noise.flat || row.blocks() == 1 || !filters.keep_all(row.size)) {
    measure(row, filters, d);
    return d.finite() ? draw(d, noise) : 0;
  }
  reset(row, filters.temperature, d);
  return measure_peaks(d) ? draw_within(d, draw_block(d, noise), noise) : 0;
}

double Draft::log_of(int64_t id, float temperature) const {
  if (id >= row.size || !std::isfinite(lse)) return kLogZero;
  const float x = row.value(id);
  const double log_q = x >= threshold ? foretoken::log_of(x, temperature, lse) : kLogZero;
  return std::isfinite(log_q) ? log_q : kLogZero;
}

// The sum of max(p - q / w, 0) over block j, relative to p at the block's largest logit. If `logs`:
// writes log(w p - q), relative to p at the row's largest logit, to `out`. It is log p + log w +
// log(1 - e^d) with d = log q - log p - log w, the difference of the raw logits / T minus `shift_`.
template <bool logs>
float Residual::sum_block(int64_t j, float* out) const {
  alignas(64) float p_buffer[kBlock], q_buffer[kBlock];
  const float* p = p_.row.block(j, p_buffer);
  const int64_t padded = p_.row.padded(j);
  const int64_t shared = j < q_->row.blocks() ? std::min(padded, q_->row.padded(j)) : 0;
  const float* q = shared ? q_->row.block(j, q_buffer) : nullptr;
  const float least = std::max(p_.threshold, -std::numeric_limits<float>::max());
  const Vec shift = splat(static_cast<float>(shift_)), log_zero = splat(kMinusInfinity);
  Vec sum = {};
  for (int64_t i = 0; i < padded; i += kWidth) {
    const Vec x = load(p + i);
    Vec y = i < shared ? load(q + i) : log_zero;
    y = y >= splat(q_->threshold) ? y : log_zero;
    const Vec d = (y - x) * p_.inverse - shift;
    const IntVec is_positive = (x >= splat(least)) & (d < Vec{});
    const Vec rest = one_minus_exp2(d * kLog2e);
    if (logs) {
      store(out + i, is_positive ? (x - p_.top) * p_.inverse + log(rest) : log_zero);
    } else {
      const Vec part = exp2_of((x - p_.peak_J[j]) * (p_.inverse * kLog2e)) * rest;
      sum += is_positive ? part : Vec{};
    }
  }
  return sum_lanes(sum);
}

// The same logarithms for any q; returns the padded length.
int64_t Residual::log_block(int64_t j, float* out) const {
  if (q_) {
    sum_block<true>(j, out);
    return p_.row.padded(j);
  }
  const int64_t count = p_.scaled_block(j, out);
  if (token_ / kBlock == j && token_ < p_.row.size) out[token_ % kBlock] = kMinusInfinity;
  return count;
}

// Write the log-masses of the blocks' residuals to scratch_masses, relative to p as in `log_block`.
void Residual::sum_blocks() const {
  scratch_masses = p_.mass_J;
  if (q_) {
    for (int64_t j = 0; j < p_.row.blocks(); j++) {
      if (p_.mass_J[j] == kMinusInfinity) continue;
      const float sum = sum_block<false>(j, nullptr);
      scratch_masses[j] = std::log(sum) + (p_.peak_J[j] - p_.top) * p_.inverse;
    }
  } else if (token_ < p_.row.size) {  // the other blocks keep their masses
    alignas(64) float z[kBlock];
    const int64_t j = token_ / kBlock, count = log_block(j, z);
    const float peak = *std::max_element(z, z + count);
    Vec sum = {};
    for (int64_t i = 0; i < count && peak > kMinusInfinity; i += kWidth)
      sum += exp2_of((load(z + i) - peak) * kLog2e);
    scratch_masses[j] = peak + std::log(sum_lanes(sum));
  }
}

// Write the logarithms of the residual of p's listed tokens, if above 0, to scratch_list, likewise.
void Residual::fill_list() const {
  scratch_list.clear();
  for (const Token& t : p_.kept) {
    const double z = (static_cast<double>(t.logit) - p_.top) / p_.temperature;
    if (!q_) {
      if (t.id != token_) scratch_list.push_back({static_cast<float>(z), t.id});
      continue;
    }
    float y = t.id < q_->row.size ? q_->row.value(t.id) : kMinusInfinity;
    if (!(y >= q_->threshold)) y = kMinusInfinity;
    const double d = (static_cast<double>(y) - t.logit) / p_.temperature - shift_;
    if (d < 0) scratch_list.push_back({static_cast<float>(z + std::log(-std::expm1(d))), t.id});
  }
}

double Residual::mass() const {
  if (!q_) return -std::exp(log_w_) * std::expm1(p_.log_of(token_));
  const double scale = static_cast<double>(p_.top) / p_.temperature - p_.lse + log_w_;
  double sum = 0;
  if (p_.listed) {
    fill_list();
    for (const ListedToken& token : scratch_list) sum += std::exp(token.z + scale);
  } else {
    sum_blocks();
    for (float mass : scratch_masses)
      if (mass > kMinusInfinity) sum += std::exp(mass + scale);
  }
  return sum;
}

int64_t Residual::draw(const Noise& noise) const {
  if (p_.listed) {
    fill_list();
    return scratch_list.empty() ? -1 : draw_listed(scratch_list, noise, p_.row.size);
  }
  alignas(64) float z[kBlock];
  GumbelArgmax tokens(noise.token, noise.fp64);
  int64_t first = 0, last = p_.row.blocks() - 1;
  if (!noise.flat && last > 0) {
    sum_blocks();
    GumbelArgmax blocks(noise.block, noise.fp64);
    blocks.add(scratch_masses.data(), 0, static_cast<int64_t>(scratch_masses.size()));
    first = last = blocks.id();
  }
  for (int64_t j = first; j <= last; j++)
    if (!tokens.excludes((p_.peak_J[j] - p_.top) * p_.inverse))
      tokens.add(z, j * kBlock, log_block(j, z));
  return tokens.exists() ? tokens.id() : -1;
}
}  // namespace foretoken
