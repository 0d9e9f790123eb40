// `ops.Backend.verify`: at once where the rule is simple, else in three stages with
// `ops/rules.py` between them.
#pragma once

#include "sampling.h"

namespace foretoken {

// B requests of up to K drafts, num_B[b] + 1 rows of logits each. `cache` may be null.
struct VerifyBatch {
  Logits logits;
  const Edits* edits;
  const Cache* cache;
  const int64_t *slot_B, *position_B, *num_B;
  const void* token_BK;  // int32 if `narrow`, else int64
  const uint8_t* real_q_B;
  int64_t requests, drafts, narrow, fp64_noise;
};

// `ops.Verdict`: accepted drafts and the token after them, then -1. The last token is -1, and finite
// 0, where a row that decided is not finite.
struct Outcome {
  void* token_BK1;  // as `VerifyBatch::token_BK`
  int64_t* n_accept_B;
  uint8_t* finite_B;
};

// Whether every request of the batch is under a rule that `verify` decides.
bool decides(const Params& params, const VerifyBatch& batch);

// STANDARD and COUPLED: draft by draft, as far as they are accepted.
void verify(const Params& params, const VerifyBatch& batch, const Outcome& out);

// What stage (i) finds, [B, K] each: see `ops/rules.py: RuleInputs`. `finite_BK`: of target rows.
struct Reduced {
  double *log_p_BK, *log_q_BK, *log_u_BK;
  uint8_t* finite_BK;
};

void reduce(const Params& params, const VerifyBatch& batch, const Reduced& out);

// Sum max(w p - q, 0) of each draft's row for requests under BLOCK, given log w [B, K + 1]: [B, K].
void masses(const Params& params, const VerifyBatch& batch, const Reduced& reduced,
            const double* log_w_BK1, double* mass_BK);

// Stage (iii); `out.n_accept_B` is given.
void emit(const Params& params, const VerifyBatch& batch, const Reduced& reduced,
          const double* log_w_BK1, const Outcome& out);

}  // namespace foretoken
