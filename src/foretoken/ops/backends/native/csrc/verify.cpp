// `ops.Backend.verify`: each request by the rule of its slot. Rows are read as far as the rule needs
// them, each once; BLOCK reads the row that it draws from twice.
#include <algorithm>
#include <vector>

#include "call.h"
#include "pool.h"
#include "sampling.h"

namespace foretoken {

// `ops.VerifyBatch`: num_B[b] + 1 rows of logits for each request. `cache` may be null, and so may
// `synthetic_rate_K` if no request is under SYNTHETIC.
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

// One request of a batch.
struct Request {
  const Params& params;
  const VerifyBatch& batch;
  int64_t index, slot, first_row;

  bool greedy() const { return params.greedy(slot); }
  bool synthetic() const { return params.rule_S[slot] == kSynthetic; }
  Row row(int64_t i) const { return row_of(batch.logits, batch.edits, first_row + i); }

  int64_t token(int64_t i) const { return batch.token_BK[index * batch.drafts + i]; }

  // Under SYNTHETIC an id that the target lacks is no draft: a rate cannot make it a token.
  bool has_draft(int64_t i) const {
    if (i >= batch.num_B[index] || token(i) < 0) return false;
    return token(i) < batch.logits.vocabulary || !synthetic();
  }
  // The q of draft i, if it was kept and the rule reads it.
  std::optional<Draft> q(int64_t i) const {
    if (!batch.real_q_B[index] || !batch.cache || greedy() || params.coupled(slot)) return {};
    const Cache& cache = *batch.cache;
    const int64_t at = slot * cache.drafts + i;
    return Draft{Row{cache.row(slot, i), cache.dtype, cache.vocabulary}, cache.threshold_SK[at],
                 cache.lse_SK[at]};
  }

  // -inf if q = 0 everywhere.
  double log_q(int64_t i) const {
    if (!has_draft(i)) return kNothing;
    const std::optional<Draft> draft = q(i);
    return draft ? draft->log_of(token(i), params.temperature_S[slot]) : 0;
  }

  double log_u(int64_t i) const {
    const Address a = at(params.key_S[slot], batch.position_B[index] + i, i, kAccept);
    return std::log(uniform_at(0, a, batch.fp64));
  }

  // Whether draft i is accepted once those before it are. For SYNTHETIC the ratio is computed but not
  // used: it must take the time of STANDARD.
  bool accepts(int64_t i, double log_ratio) const {
    return log_u(i) < (synthetic() ? std::log(batch.synthetic_rate_K[i]) : log_ratio);
  }

  Noise noise(int64_t i, Stream token_stream, Stream block_stream) const {
    const Place place{slot, batch.position_B[index] + i, 0, batch.logits.vocabulary, batch.fp64};
    return place.noise(params, token_stream, block_stream);
  }

  // The target's own draw: the argmax or a draw with TARGET noise; -1 if p is not finite.
  int64_t own_draw(int64_t i, Distribution& d) const {
    if (greedy()) {
      const Largest best = largest(row(i));
      return best.finite ? best.id : -1;
    }
    measure(row(i), params.filters(slot), d);
    return d.finite() ? draw(d, noise(i, kTargetToken, kTargetBlock)) : -1;
  }

  // max(w p - q, 0) of row i, which `d` has measured; it is finite.
  Residual residual(int64_t i, const Distribution& d, double log_w) const {
    return Residual(d, q(i), token(i), log_w);
  }

  // The token in place of the rejected draft i.
  int64_t replacement(int64_t i, const Distribution& d, double log_w) const {
    const Noise how = noise(i, kResidualToken, kResidualBlock);
    const int64_t found = residual(i, d, log_w).draw(how);
    return found < 0 ? draw(d, how) : found;
  }

  void write(const Verdict& out, int64_t accepted, int64_t last) const {
    int64_t* tokens = out.token_BK1 + index * (batch.drafts + 1);
    for (int64_t i = 0; i <= batch.drafts; i++)
      tokens[i] = i < accepted ? token(i) : i == accepted ? last : -1;
    out.n_accept_B[index] = accepted;
    out.finite_B[index] = last >= 0;
  }
};

// STANDARD, COUPLED and SYNTHETIC: draft by draft, up to the first rejected one.
void verify_one(const Request& r, const Verdict& out) {
  Distribution& d = scratch();
  const bool by_own_draw = r.greedy() || r.params.coupled(r.slot);
  bool finite = true;  // all rows so far; only SYNTHETIC goes past one that is not finite
  for (int64_t i = 0;; i++) {
    const double log_q = r.log_q(i);
    if (by_own_draw || !(log_q > kNothing)) {
      const int64_t own = r.own_draw(i, d);
      finite &= own >= 0;
      if (log_q > kNothing && (r.synthetic() ? r.accepts(i, 0) : own == r.token(i))) continue;
      return r.write(out, i, finite ? own : -1);
    }
    measure(r.row(i), r.params.filters(r.slot), d);
    finite &= d.finite();
    if (r.accepts(i, d.log_of(r.token(i)) - log_q)) continue;
    return r.write(out, i, finite ? r.replacement(i, d, 0) : -1);
  }
}

// BLOCK (Sun et al. 2024, algorithm 2), a row at a time: the weight w = p_i of row i follows from the
// rows before it. The prefix of i drafts counts if u_i < h_i = S_i / (S_i + 1 - p_i); if no draft
// follows, if u_i < p_i. S_i <= p_i, so that h_i <= p_i, and p_i = 1 makes it 1: S_i is summed only if
// u_i < p_i < 1.
void verify_block(const Request& r, const Verdict& out) {
  Distribution& d = scratch();
  int64_t accepted = 0, i = 0;
  double log_w = 0, accepted_log_w = 0;
  for (;; i++) {
    const double log_q = r.log_q(i);
    const bool drafted = log_q > kNothing;
    if (drafted) measure(r.row(i), r.params.filters(r.slot), d);
    bool counts = i > 0 && r.log_u(i - 1) < log_w;
    if (counts && drafted && log_w < 0) {
      const double mass = d.finite() ? r.residual(i, d, log_w).mass() : 0;  // S_i
      counts = r.log_u(i - 1) < std::log(mass / (mass + 1 - std::exp(log_w)));
    }
    if (counts) accepted = i, accepted_log_w = log_w;
    if (!drafted) break;
    log_w = std::min(0.0, log_w + d.log_of(r.token(i)) - log_q);
    if (log_w == kNothing) break;  // no longer prefix can count
  }
  if (!(r.log_q(accepted) > kNothing)) return r.write(out, accepted, r.own_draw(accepted, d));
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
      block ? verify_block(request, out) : verify_one(request, out);
    });
  });
}

}  // namespace foretoken
