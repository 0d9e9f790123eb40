// `ops.Backend.verify`.
#pragma once

#include "sampling.h"

namespace foretoken {

// B requests of up to K drafts, num_B[b] + 1 rows of logits each. `cache` may be null, and so may
// `synthetic_rate_K` if no request is under SYNTHETIC.
struct VerifyBatch {
  Logits logits;
  const Edits* edits;
  const Cache* cache;
  const int64_t *slot_B, *position_B, *num_B;
  const void* token_BK;  // int32 if `narrow`, else int64
  const uint8_t* real_q_B;
  const double* synthetic_rate_K;
  int64_t requests, drafts, narrow, fp64_noise;
};

// `ops.Verdict`: accepted drafts and the token after them, then -1. The last token is -1, and finite
// 0, where a row that decided is not finite.
struct Outcome {
  void* token_BK1;  // as `VerifyBatch::token_BK`
  int64_t* n_accept_B;
  uint8_t* finite_B;
};

// Each request by the rule of its slot; false, and nothing done, if one of these is no `Rule`. Rows are
// read as far as the rule needs them, each once, and by BLOCK the one that is drawn from twice.
bool verify(const Params& params, const VerifyBatch& batch, const Outcome& out);

}  // namespace foretoken
