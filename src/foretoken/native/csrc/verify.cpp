#include "verify.h"

#include <vector>

#include "pool.h"

namespace foretoken {
namespace {

// One request of a batch.
struct Request {
  const Params& params;
  const VerifyBatch& batch;
  int64_t index, slot, first_row;

  bool greedy() const { return params.temperature_S[slot] == 0; }
  Row row(int64_t i) const { return row_of(batch.logits, batch.edits, first_row + i); }

  int64_t token(int64_t i) const {
    const int64_t n = index * batch.drafts + i;
    return batch.narrow ? static_cast<const int32_t*>(batch.token_BK)[n]
                        : static_cast<const int64_t*>(batch.token_BK)[n];
  }

  // A rate does not make a token out of an id that the target lacks.
  bool has_draft(int64_t i) const {
    if (i >= batch.num_B[index] || token(i) < 0) return false;
    return token(i) < batch.logits.vocabulary || params.rule_S[slot] != kSynthetic;
  }
  bool real_q() const {
    return batch.real_q_B[index] && batch.cache && !greedy() && !params.coupled(slot);
  }

  Draft q(int64_t i) const {
    const Cache& cache = *batch.cache;
    const int64_t at = slot * cache.drafts + i;
    return {Row{cache.row(slot, i), cache.dtype, cache.vocabulary}, cache.threshold_SK[at],
            cache.lse_SK[at]};
  }

  // -inf: q = 0 everywhere.
  double log_q(int64_t i) const {
    if (!has_draft(i)) return kNothing;
    return real_q() ? q(i).log_of(token(i), params.temperature_S[slot]) : 0;
  }

  double log_u(int64_t i) const {
    const Address a = at(params.key_S[slot], batch.position_B[index] + i, i, kAccept);
    return std::log(uniform_at(0, a, batch.fp64_noise));
  }

  Noise noise(int64_t i, int token_stream, int block_stream) const {
    const Place place{slot, batch.position_B[index] + i, 0, batch.logits.vocabulary,
                      batch.fp64_noise != 0};
    return place.noise(params, token_stream, block_stream);
  }

  // The token that p alone decides: the argmax or a draw with TARGET noise; -1 if p is not finite.
  int64_t own(int64_t i, Distribution& d) const {
    if (greedy()) {
      const Largest best = largest(row(i));
      return best.finite ? best.id : -1;
    }
    measure(row(i), params.filters(slot), d);
    return d.finite() ? draw(d, noise(i, kTargetToken, kTargetBlock)) : -1;
  }

  // The token in place of draft i, which was rejected; `d` is its measured row.
  int64_t instead(int64_t i, const Distribution& d, double log_w) const {
    const Noise residual = noise(i, kResidualToken, kResidualBlock);
    int64_t found;
    if (real_q()) {
      const Draft draft = q(i);
      found = Residual(d, draft, log_w).draw(residual);
    } else {
      found = Residual(d, token(i)).draw(residual);
    }
    return found < 0 ? draw(d, residual) : found;
  }

  void write(const Outcome& out, int64_t accepted, int64_t last) const {
    const int64_t from = index * (batch.drafts + 1);
    out.n_accept_B[index] = accepted;
    out.finite_B[index] = last >= 0;
    for (int64_t i = 0; i <= batch.drafts; i++) {
      const int64_t id = i < accepted ? token(i) : i == accepted ? last : -1;
      if (batch.narrow) {
        static_cast<int32_t*>(out.token_BK1)[from + i] = static_cast<int32_t>(id);
      } else {
        static_cast<int64_t*>(out.token_BK1)[from + i] = id;
      }
    }
  }
};

std::vector<Request> requests_of(const Params& params, const VerifyBatch& batch) {
  std::vector<Request> all;
  all.reserve(batch.requests);
  int64_t row = 0;
  for (int64_t index = 0; index < batch.requests; row += batch.num_B[index++] + 1)
    all.push_back({params, batch, index, batch.slot_B[index], row});
  return all;
}

bool worth_all_rows(const VerifyBatch& batch) {
  return worth_waking(batch.requests * (batch.drafts + 1), batch.logits.vocabulary);
}

void verify_one(const Request& r, const Outcome& out) {
  Distribution& d = scratch();
  for (int64_t i = 0;; i++) {
    const bool drafted = r.has_draft(i);
    if (r.greedy() || r.params.coupled(r.slot)) {
      const int64_t own = r.own(i, d);
      if (drafted && own == r.token(i)) continue;
      return r.write(out, i, own);
    }
    const double log_q = r.log_q(i);
    if (!(log_q > kNothing)) return r.write(out, i, r.own(i, d));
    measure(r.row(i), r.params.filters(r.slot), d);
    if (!d.finite()) return r.write(out, i, -1);
    if (r.log_u(i) < d.log_of(r.token(i)) - log_q) continue;
    return r.write(out, i, r.instead(i, d, 0));
  }
}

}  // namespace

bool decides(const Params& params, const VerifyBatch& batch) {
  for (int64_t b = 0; b < batch.requests; b++) {
    const int64_t rule = params.rule_S[batch.slot_B[b]];
    if (rule != kStandard && rule != kCoupled) return false;
  }
  return true;
}

void verify(const Params& params, const VerifyBatch& batch, const Outcome& out) {
  const auto all = requests_of(params, batch);
  parallel_for(batch.requests, worth_all_rows(batch), [&](int64_t b) { verify_one(all[b], out); });
}

void reduce(const Params& params, const VerifyBatch& batch, const Reduced& out) {
  const auto all = requests_of(params, batch);
  parallel_for(batch.requests * batch.drafts, worth_all_rows(batch), [&](int64_t n) {
    const int64_t i = n % batch.drafts;
    const Request& r = all[n / batch.drafts];
    const bool synthetic = params.rule_S[r.slot] == kSynthetic;
    const bool one_hot = r.greedy() || params.coupled(r.slot);
    out.log_p_BK[n] = out.log_u_BK[n] = kNothing;  // u = 0 decides alike where p and q are one-hot
    out.log_q_BK[n] = r.log_q(i);
    out.finite_BK[n] = 1;
    if (!r.has_draft(i)) return;
    Distribution& d = scratch();
    if (one_hot) {
      const int64_t own = r.own(i, d);
      out.finite_BK[n] = own >= 0;
      if (own == r.token(i)) out.log_p_BK[n] = 0;
    } else {
      measure(r.row(i), params.filters(r.slot), d);
      out.finite_BK[n] = d.finite();
      if (d.finite()) out.log_p_BK[n] = d.log_of(r.token(i));
    }
    if (!one_hot || synthetic) out.log_u_BK[n] = r.log_u(i);
  });
}

void masses(const Params& params, const VerifyBatch& batch, const Reduced& reduced,
            const double* log_w_BK1, double* mass_BK) {
  const auto all = requests_of(params, batch);
  parallel_for(batch.requests * batch.drafts, worth_all_rows(batch), [&](int64_t n) {
    const int64_t b = n / batch.drafts, i = n % batch.drafts;
    const Request& r = all[b];
    const double log_w = log_w_BK1[b * (batch.drafts + 1) + i], w = std::exp(log_w);
    mass_BK[n] = w;  // of q = 0
    if (params.rule_S[r.slot] != kBlockRule || w == 0 || !(reduced.log_q_BK[n] > kNothing)) return;
    mass_BK[n] = 0;  // of a row that is not finite, p = 0
    if (!reduced.finite_BK[n]) return;
    if (!r.real_q()) {
      mass_BK[n] = -w * std::expm1(reduced.log_p_BK[n]);
      return;
    }
    Distribution& d = scratch();
    measure(r.row(i), params.filters(r.slot), d);
    const Draft draft = r.q(i);
    mass_BK[n] = Residual(d, draft, log_w).mass();
  });
}

void emit(const Params& params, const VerifyBatch& batch, const Reduced& reduced,
          const double* log_w_BK1, const Outcome& out) {
  const auto all = requests_of(params, batch);
  parallel_for(batch.requests, worth_waking(batch.requests, batch.logits.vocabulary), [&](int64_t b) {
    const Request& r = all[b];
    const int64_t i = out.n_accept_B[b], n = b * batch.drafts + i;
    for (int64_t k = 0; k < i; k++)
      if (!reduced.finite_BK[b * batch.drafts + k]) return r.write(out, i, -1);
    const bool rejected = i < batch.drafts && reduced.log_q_BK[n] > kNothing;
    Distribution& d = scratch();
    if (!rejected || r.greedy() || params.coupled(r.slot)) return r.write(out, i, r.own(i, d));
    measure(r.row(i), params.filters(r.slot), d);
    const double log_w = log_w_BK1[b * (batch.drafts + 1) + i];
    r.write(out, i, d.finite() ? r.instead(i, d, log_w) : -1);
  });
}

}  // namespace foretoken
