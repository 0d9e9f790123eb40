// `ops.Backend.verify`: each request by the rule of its slot, which reads the rows that it needs.
#include <algorithm>
#include "call.h"
#include "pool.h"
#include "sampling.h"

namespace foretoken {
// `ops.VerifyBatch`. `cache` may be null; `synthetic_rate_K`, too, if no request is under SYNTHETIC.
struct VerifyBatch {
  const int64_t *slot_B, *position_B, *num_B, *token_BK;
  const bool* real_q_B;
  const double* synthetic_rate_K;
  Logits logits;
  const Params* params;
  const Edits* edits;
  const Cache* cache;
  int64_t requests, drafts, fp64;
};

namespace {
// Memory for `ops.Verdict`.
struct Verdict {
  int64_t *token_BK1, *n_accept_B;
  bool* finite_B;
};

struct Request {
  const Params& params;
  const VerifyBatch& batch;
  int64_t index, slot, first_row;

  bool greedy() const { return params.greedy(slot); }
  bool synthetic() const { return params.rule_S[slot] == kSynthetic; }
  Row row(int64_t i) const { return row_of(batch.logits, batch.edits, first_row + i); }
  int64_t token(int64_t i) const { return batch.token_BK[index * batch.drafts + i]; }

  // Under SYNTHETIC an id that the target lacks counts as no draft, since a rate would accept it.
  bool has_draft(int64_t i) const {
    if (i >= batch.num_B[index] || token(i) < 0) return false;
    return token(i) < batch.logits.vocabulary || !synthetic();
  }
  // The q of draft i, if it is in the cache and the rule reads it.
  std::optional<Draft> q(int64_t i) const {
    if (!batch.real_q_B[index] || !batch.cache || greedy() || params.coupled(slot)) return {};
    const Cache& cache = *batch.cache;
    const int64_t entry = slot * cache.drafts + i;
    return Draft{Row{cache.row(slot, i), cache.dtype, cache.vocabulary}, cache.threshold_SK[entry],
                 cache.lse_SK[entry]};
  }

  // log q(x_i); -inf if there is no draft i, or q(x_i) counts as 0.
  double log_q(int64_t i) const {
    if (!has_draft(i)) return kLogZero;
    const std::optional<Draft> draft = q(i);
    return draft ? draft->log_of(token(i), params.temperature_S[slot]) : 0;
  }

  double log_u(int64_t i) const {
    const auto name = stream_name(params.key_S[slot], batch.position_B[index] + i, i, kAccept);
    return std::log(uniform_at(0, name, batch.fp64));
  }

  // Whether draft i is accepted if all drafts before it are. SYNTHETIC takes a ratio, which it does not
  // use, in order to take the time of STANDARD.
  bool accepts(int64_t i, double log_ratio) const {
    return log_u(i) < (synthetic() ? std::log(batch.synthetic_rate_K[i]) : log_ratio);
  }

  Noise noise(int64_t i, Stream token_stream, Stream block_stream) const {
    const NoiseName name{slot, batch.position_B[index] + i, 0, batch.logits.vocabulary, batch.fp64};
    return name.noise(params, token_stream, block_stream);
  }

  // The target's own draw from row i: the argmax or a draw with TARGET noise; -1 if p is not finite.
  int64_t own_draw(int64_t i, Distribution& d) const {
    if (greedy()) {
      const Largest best = largest(row(i));
      return best.finite ? best.id : -1;
    }
    measure(row(i), params.filters(slot), d);
    return d.finite() ? draw(d, noise(i, kTargetToken, kTargetBlock)) : -1;
  }

  // max(w p - q, 0) of row i, with the finite distribution `d`.
  Residual residual(int64_t i, const Distribution& d, double log_w) const {
    return Residual(d, q(i), token(i), log_w);
  }

  // The token that replaces the rejected draft i: from the residual, or from p if that has no mass.
  int64_t replacement(int64_t i, const Distribution& d, double log_w) const {
    const Noise residual_noise = noise(i, kResidualToken, kResidualBlock);
    const int64_t token = residual(i, d, log_w).draw(residual_noise);
    return token < 0 ? draw(d, residual_noise) : token;
  }

  void write(const Verdict& out, int64_t accepted, int64_t last) const {
    int64_t* tokens = out.token_BK1 + index * (batch.drafts + 1);
    for (int64_t i = 0; i <= batch.drafts; i++)
      tokens[i] = i < accepted ? token(i) : i == accepted ? last : -1;
    out.n_accept_B[index] = accepted;
    out.finite_B[index] = last >= 0;
  }
};

// STANDARD, COUPLED and SYNTHETIC: draft by draft, up to the first rejected draft.
void verify_in_order(const Request& r, const Verdict& out) {
  Distribution& d = scratch();
  const bool one_hot_p = r.greedy() || r.params.coupled(r.slot);
  bool finite = true;  // whether all rows up to row i are; only SYNTHETIC continues if one is not
  for (int64_t i = 0;; i++) {
    const double log_q = r.log_q(i);
    if (one_hot_p || !(log_q > kLogZero)) {
      const int64_t drawn = r.own_draw(i, d);
      finite &= drawn >= 0;
      if (log_q > kLogZero && (r.synthetic() ? r.accepts(i, 0) : drawn == r.token(i))) continue;
      return r.write(out, i, finite ? drawn : -1);
    }
    measure(r.row(i), r.params.filters(r.slot), d);
    finite &= d.finite();
    if (r.accepts(i, d.log_of(r.token(i)) - log_q)) continue;
    return r.write(out, i, finite ? r.replacement(i, d, 0) : -1);
  }
}

// BLOCK (Sun et al. 2024, algorithm 2), row by row: the weight w = p_i of row i follows from the rows
// before it. The first i drafts are accepted if u_i < h_i, with h_i = S_i / (S_i + 1 - p_i), or p_i
// after the last draft. Since h_i <= p_i, and h_i = 1 if p_i = 1, S_i is summed only if u_i < p_i < 1.
void verify_block(const Request& r, const Verdict& out) {
  Distribution& d = scratch();
  int64_t accepted = 0, i = 0;
  double log_w = 0, accepted_log_w = 0;
  for (;; i++) {
    const double log_q = r.log_q(i);
    const bool has_draft = log_q > kLogZero;
    if (has_draft) measure(r.row(i), r.params.filters(r.slot), d);
    bool accepts = i > 0 && r.log_u(i - 1) < log_w;
    if (accepts && has_draft && log_w < 0) {
      const double mass = d.finite() ? r.residual(i, d, log_w).mass() : 0;  // S_i
      accepts = r.log_u(i - 1) < std::log(mass / (mass + 1 - std::exp(log_w)));
    }
    if (accepts) accepted = i, accepted_log_w = log_w;
    if (!has_draft) break;
    log_w = std::min(0.0, log_w + d.log_of(r.token(i)) - log_q);
    if (log_w == kLogZero) break;  // then no larger i is accepted
  }
  if (!(r.log_q(accepted) > kLogZero)) return r.write(out, accepted, r.own_draw(accepted, d));
  if (accepted < i) measure(r.row(accepted), r.params.filters(r.slot), d);
  r.write(out, accepted, d.finite() ? r.replacement(accepted, d, accepted_log_w) : -1);
}
}  // namespace

extern "C" int foretoken_verify(const VerifyBatch& batch, int64_t* token_BK1, int64_t* n_accept_B,
                                bool* finite_B) {
  const Params& params = *batch.params;
  for (int64_t b = 0; b < batch.requests; b++) {
    const int64_t rule = params.rule_S[batch.slot_B[b]];
    if (rule < 0 || rule > kSynthetic) return kNotCovered;
  }
  const Verdict out{token_BK1, n_accept_B, finite_B};
  return guarded([&] {
    std::vector<int64_t> first_row(batch.requests, 0);
    for (int64_t b = 1; b < batch.requests; b++)
      first_row[b] = first_row[b - 1] + batch.num_B[b - 1] + 1;
    const bool worth = worth_waking(batch.requests * (batch.drafts + 1), batch.logits.vocabulary);
    parallel_for(batch.requests, worth, [&](int64_t b) {
      const Request request{params, batch, b, batch.slot_B[b], first_row[b]};
      const bool block = params.rule_S[request.slot] == kBlockRule && !request.greedy();
      block ? verify_block(request, out) : verify_in_order(request, out);
    });
  });
}
}  // namespace foretoken
