// Gumbel-max sampling and verification of processed logits: `ops.Backend.sample` and `.verify`.
#pragma once

#include <cstdint>

namespace foretoken {

// `ops.SlotParams`.
struct Params {
  const int64_t* key_S;
  const float* temperature_S;
  const int64_t* top_k_S;
  const float *top_p_S, *min_p_S;
};

// Whether top-k, top-p or min-p may drop tokens of one of these slots.
bool any_filter(const Params& params, const int64_t* slots, int64_t count, int64_t vocabulary);

// As `ops/types.py: Stream`.
enum Stream { kTargetToken, kTargetBlock, kResidualToken, kResidualBlock, kDraftToken, kDraftBlock,
              kAccept };

// Lowest id of the largest number of a row; 0 if there is a NaN.
int64_t argmax(const float* row, int64_t size);

// row / temperature, or the row as it is at T=0.
void scale_row(const float* row, int64_t size, float temperature, float* out);

// One token of a row of processed logits, drawn as the slot's parameters want it.
int64_t draw(const float* row, int64_t size, const Params& params, int64_t slot, int64_t position,
             int64_t draft_index, int token_stream, int block_stream);

// Temperature of raw rows: out = row / T of its slot.
void scale(const Params& params, const float* logits_NV, const int64_t* slot_N, int64_t rows,
           int64_t vocabulary, float* out_NV);

// Rows to draw one token from each.
struct SampleRows {
  const float* logits_NV;
  const int64_t *slot_N, *position_N, *draft_index_N;
  int64_t rows, vocabulary, token_stream, block_stream;
};

void sample(const Params& params, const SampleRows& rows, int64_t* token_N);

// A batch of requests to verify; B requests of up to K drafts, num_B[b] + 1 rows each. q: draft
// logits [S, q_drafts, q_vocabulary] by slot, or null.
struct VerifyBatch {
  const float *logits_NV, *q_logits;
  const int64_t *slot_B, *position_B, *num_B, *token_BK;
  const uint8_t* real_q_B;
  int64_t requests, drafts, vocabulary, q_drafts, q_vocabulary;
};

// What stage (i) finds, [B, K] each: log p and log q of the drafts, log of the uniforms, and what
// normalises p and q. See `ops/rules.py: RuleInputs`.
struct Reduced {
  double *log_p_BK, *log_q_BK, *log_u_BK, *lse_p_BK, *lse_q_BK;
};

void reduce(const Params& params, const VerifyBatch& batch, const Reduced& out);

// Stage (iii): accepted drafts and the token after them, then -1: [B, K+1]. The last token is -1,
// and finite 0, where p is not finite.
void emit(const Params& params, const VerifyBatch& batch, const Reduced& reduced,
          const int64_t* n_accept_B, const double* log_w_B, int64_t* token_BK1, uint8_t* finite_B);

}  // namespace foretoken
