#include "sampling.h"

#include <cmath>
#include <limits>
#include <vector>

#include "noise.h"
#include "pool.h"

namespace foretoken {
namespace {

constexpr int64_t kBlock = 1024;  // ids per block of the hierarchical draw
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr double kNothing = -std::numeric_limits<double>::infinity();

// `kWidth` numbers of a row that ends at `size`; -inf behind it.
inline Vec load_padded(const float* row, int64_t i, int64_t size) {
  if (i + kWidth <= size) return load(row + i);
  Vec v = splat(kMinusInfinity);
  for (int64_t j = 0; j + i < size; j++) v[j] = row[i + j];
  return v;
}

// Largest of a row, NaN if there is one.
float peak(const float* row, int64_t size) {
  Vec best = splat(kMinusInfinity);
  IntVec broken = {};
  for (int64_t i = 0; i < size; i += kWidth) {
    const Vec x = load_padded(row, i, size);
    broken |= x != x;
    best = max(best, x);
  }
  for (int i = 0; i < kWidth; i++)
    if (broken[i]) return std::numeric_limits<float>::quiet_NaN();
  return max_lane(best);
}

// log sum exp; -inf of an empty row, not finite if a number is not.
double log_sum_exp(const float* row, int64_t size) {
  const float top = peak(row, size);
  if (top == kMinusInfinity || !std::isfinite(top)) return top;
  double total = 0;
  for (int64_t first = 0; first < size; first += kBlock) {
    const int64_t end = first + kBlock < size ? first + kBlock : size;
    Vec sum = {};
    for (int64_t i = first; i < end; i += kWidth) sum += exp(load_padded(row, i, end) - top);
    total += sum_lanes(sum);
  }
  return top + std::log(total);
}

// Where max(score, noise of id + logit) is; the first of equals.
struct Best {
  float score = kMinusInfinity;
  int64_t id = 0;
  void offer(float other, int64_t at) {
    if (other > score) score = other, id = at;
  }
};

// Best of ids first..first+count-1 under Gumbel noise named by id; `first` is a multiple of 4.
Best best_of(const float* logit, int64_t first, int64_t count, const Address& a) {
  Best best;
  float noise[4 * kGroups];
  for (int64_t i = 0; i < count; i += 4 * kGroups) {
    uniforms(first + i, a, noise);
    const int64_t end = count - i < 4 * kGroups ? count - i : 4 * kGroups;
    for (int64_t j = 0; j < end; j += kWidth) {
      const Vec score = load_padded(logit, i + j, count) + gumbel(load(noise + j));
      if (max_lane(score) > best.score)
        for (int k = 0; k < kWidth; k++) best.offer(score[k], first + i + j + k);
    }
  }
  return best;
}

// Flat noise over the survivors: argmax(logit + G_id), lowest id on ties.
int64_t draw_flat(const float* row, int64_t size, const Address& a) {
  Best best;
  for (int64_t i = 0; i < size; i += 4 * kGroups) {
    const int64_t end = i + 4 * kGroups < size ? i + 4 * kGroups : size;
    if (peak(row + i, end - i) == kMinusInfinity) continue;
    const Best found = best_of(row + i, i, end - i, a);
    best.offer(found.score, found.id);
  }
  return best.id;
}

// The block by its log-mass, then the token in it; P(block) P(token | block) = P(token).
int64_t draw_hierarchical(const float* row, int64_t size, const Address& token,
                          const Address& block) {
  int64_t first = 0;
  if (size > kBlock) {
    const int64_t blocks = (size + kBlock - 1) / kBlock;
    thread_local std::vector<float> masses;
    masses.resize(blocks);
    for (int64_t j = 0; j < blocks; j++) {
      const int64_t left = size - j * kBlock;
      masses[j] = static_cast<float>(log_sum_exp(row + j * kBlock, left < kBlock ? left : kBlock));
    }
    first = best_of(masses.data(), 0, blocks, block).id * kBlock;
  }
  const int64_t left = size - first;
  return best_of(row + first, first, left < kBlock ? left : kBlock, token).id;
}

}  // namespace

int64_t argmax(const float* row, int64_t size) {
  const float top = peak(row, size);
  for (int64_t i = 0; i < size; i++)
    if (row[i] == top) return i;
  return 0;
}

bool any_filter(const Params& params, const int64_t* slots, int64_t count, int64_t vocabulary) {
  for (int64_t n = 0; n < count; n++) {
    const int64_t slot = slots[n], k = params.top_k_S[slot];
    if (params.temperature_S[slot] == 0) continue;
    if ((k > 0 && k < vocabulary) || params.top_p_S[slot] < 1 || params.min_p_S[slot] > 0)
      return true;
  }
  return false;
}

void scale_row(const float* row, int64_t size, float temperature, float* out) {
  if (temperature == 0 || temperature == 1) {
    std::memcpy(out, row, size * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < size; i++) out[i] = row[i] / temperature;
}

void scale(const Params& params, const float* logits_NV, const int64_t* slot_N, int64_t rows,
           int64_t vocabulary, float* out_NV) {
  parallel_for(rows, rows * vocabulary > 100000, [&](int64_t n) {
    const int64_t at = n * vocabulary;
    scale_row(logits_NV + at, vocabulary, params.temperature_S[slot_N[n]], out_NV + at);
  });
}

int64_t draw(const float* row, int64_t size, const Params& params, int64_t slot, int64_t position,
             int64_t draft_index, int token_stream, int block_stream) {
  if (params.temperature_S[slot] == 0) return argmax(row, size);
  const int64_t key = params.key_S[slot], top_k = params.top_k_S[slot];
  const Address token = at(key, position, draft_index, token_stream);
  if (top_k > 0 && top_k < size) return draw_flat(row, size, token);
  return draw_hierarchical(row, size, token, at(key, position, draft_index, block_stream));
}

namespace {

// One request of a batch.
struct View {
  const VerifyBatch& b;
  int64_t index, slot, first_row;

  const float* p_row(int64_t i) const { return b.logits_NV + (first_row + i) * b.vocabulary; }
  int64_t token(int64_t i) const { return b.token_BK[index * b.drafts + i]; }
  bool has_draft(int64_t i) const { return i < b.num_B[index] && token(i) >= 0; }
  const float* q_row(int64_t i) const {
    return b.q_logits + (slot * b.q_drafts + i) * b.q_vocabulary;
  }
};

std::vector<View> views(const VerifyBatch& b) {
  std::vector<View> all;
  int64_t row = 0;
  for (int64_t index = 0; index < b.requests; row += b.num_B[index++] + 1)
    all.push_back({b, index, b.slot_B[index], row});
  return all;
}

double log_p_of(const View& v, int64_t i, bool greedy, double* lse) {
  const int64_t size = v.b.vocabulary, token = v.token(i);
  const float* row = v.p_row(i);
  if (token >= size) return kNothing;
  const double value = row[token];
  if (greedy) return std::isfinite(peak(row, size)) && argmax(row, size) == token ? 0 : kNothing;
  *lse = log_sum_exp(row, size);
  const double log_p = value - *lse;
  return std::isfinite(log_p) ? log_p : kNothing;
}

double log_q_of(const View& v, int64_t i, double* lse) {
  const int64_t size = v.b.q_vocabulary, token = v.token(i);
  const float* row = v.q_row(i);
  *lse = log_sum_exp(row, size);
  const double log_q = token < size ? row[token] - *lse : kNothing;
  return std::isfinite(log_q) ? log_q : kNothing;
}

// Logits of norm(max(w p - q, 0)) into `out`: log(w p - q) = log p + log w + log(1 - e^d) with
// d = log q - log p - log w; constants of a row fall out. False if nothing has mass.
bool residual(const View& v, int64_t i, double shift, float* out) {
  const int64_t size = v.b.vocabulary, token = v.token(i);
  const float* p = v.p_row(i);
  std::memcpy(out, p, size * sizeof(float));
  if (!v.b.real_q_B[v.index]) {
    if (token < size) out[token] = kMinusInfinity;
    return peak(out, size) > kMinusInfinity;
  }
  const float* q = v.q_row(i);
  const int64_t both = size < v.b.q_vocabulary ? size : v.b.q_vocabulary;
  const float constant = static_cast<float>(shift);
  for (int64_t k = 0; k < both; k += kWidth) {
    const Vec x = load_padded(p, k, both);
    const Vec d = load_padded(q, k, both) - x - constant;
    Vec y = log(one_minus_exp(d)) + x;
    y = select((d < Vec{}) & (y == y), y, splat(kMinusInfinity));  // q >= w p, or both are 0
    for (int64_t j = 0; j < kWidth && k + j < both; j++) out[k + j] = y[j];
  }
  return peak(out, size) > kMinusInfinity;
}

}  // namespace

void sample(const Params& params, const SampleRows& r, int64_t* token_N) {
  parallel_for(r.rows, r.rows * r.vocabulary > 30000, [&](int64_t n) {
    token_N[n] = draw(r.logits_NV + n * r.vocabulary, r.vocabulary, params, r.slot_N[n],
                      r.position_N[n], r.draft_index_N[n], static_cast<int>(r.token_stream),
                      static_cast<int>(r.block_stream));
  });
}

void reduce(const Params& params, const VerifyBatch& b, const Reduced& out) {
  const auto all = views(b);
  parallel_for(b.requests * b.drafts, b.requests * b.drafts * b.vocabulary > 20000, [&](int64_t n) {
    const int64_t i = n % b.drafts;
    const View& v = all[n / b.drafts];
    const bool greedy = params.temperature_S[v.slot] == 0;
    out.lse_p_BK[n] = out.lse_q_BK[n] = 0;
    out.log_p_BK[n] = out.log_q_BK[n] = kNothing;
    out.log_u_BK[n] = kNothing;  // u = 0 accepts alike where p and q are one-hot
    if (!v.has_draft(i)) return;
    out.log_p_BK[n] = log_p_of(v, i, greedy, &out.lse_p_BK[n]);
    out.log_q_BK[n] = !greedy && b.real_q_B[v.index] ? log_q_of(v, i, &out.lse_q_BK[n]) : 0;
    if (greedy) return;
    const Address a = at(params.key_S[v.slot], b.position_B[v.index] + i, i, kAccept);
    out.log_u_BK[n] = std::log(static_cast<double>(uniform_at(0, a)));
  });
}

void emit(const Params& params, const VerifyBatch& b, const Reduced& reduced,
          const int64_t* n_accept_B, const double* log_w_B, int64_t* token_BK1, uint8_t* finite_B) {
  const auto all = views(b);
  parallel_for(b.requests, b.requests * b.vocabulary > 20000, [&](int64_t index) {
    const View& v = all[index];
    const int64_t i = n_accept_B[index], n = index * b.drafts + i;
    int64_t* token_K1 = token_BK1 + index * (b.drafts + 1);
    for (int64_t k = 0; k <= b.drafts; k++) token_K1[k] = k < i ? v.token(k) : -1;
    const float* row = v.p_row(i);
    finite_B[index] = std::isfinite(peak(row, b.vocabulary));
    if (!finite_B[index]) return;
    int token_stream = kTargetToken, block_stream = kTargetBlock;
    if (i < b.drafts && reduced.log_q_BK[n] > kNothing) {  // a draft with a q was rejected
      token_stream = kResidualToken, block_stream = kResidualBlock;
      if (params.temperature_S[v.slot] > 0) {
        thread_local std::vector<float> weights;
        weights.resize(b.vocabulary);
        const double shift = reduced.lse_q_BK[n] - reduced.lse_p_BK[n] + log_w_B[index];
        if (residual(v, i, shift, weights.data())) row = weights.data();
      }
    }
    token_K1[i] = draw(row, b.vocabulary, params, v.slot, b.position_B[index] + i, 0, token_stream,
                       block_stream);
  });
}

}  // namespace foretoken
