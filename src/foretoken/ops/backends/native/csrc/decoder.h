// One forward pass of a dense decoder (Llama and its relatives): packed tokens in, logits out.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"
#include "gemm.h"
#include "sampling.h"
#include "tuning.h"

namespace foretoken {

// Dimensions and constants of a model. Mirrored by `native/library.py`.
struct DecoderShape {
  int64_t layers, hidden, intermediate, heads, kv_heads, head_size, vocabulary;
  int64_t rotary_size;  // leading dimensions of a head that are rotated, in two halves
  float norm_epsilon, attention_scale, rotary_scale;
};

// Weights of one layer as PyTorch holds them, row-major float32; null where a model has none.
struct LayerWeights {
  const float *input_norm, *post_attention_norm;
  const float *q, *k, *v, *o, *q_bias, *k_bias, *v_bias, *o_bias;
  const float *q_norm, *k_norm;  // [head_size], over each head
  const float *gate, *up, *down, *gate_bias, *up_bias, *down_bias;
  int64_t window;
};

// The packed tokens of one pass. Mirrored by `native/library.py`.
struct Batch {
  const int64_t *token_T, *row_N;  // row_N: tokens whose logits are wanted
  int64_t num_tokens, num_rows;
  AttentionBatch attention;
};

// A round of drafting, each request drafting num_drafts_B[b] >= 1 tokens from the row that the first
// pass gives it on. Mirrored by `native/library.py`.
struct DraftRound {
  const int64_t *slot_B, *num_drafts_B;
  int64_t most;
  const Cache* cache;  // gets the q of every draft; null: drafts are the argmax of the logits
  int64_t fp64_noise;
  int64_t* token_BK;  // [B, most]: the drafts; entries past num_drafts_B are left alone
};

class Decoder {
 public:
  Decoder(const DecoderShape& shape, const LayerWeights* layers, const float* embedding,
          const float* final_norm, const float* head, const float* frequencies);
  // keys, values: one pointer per layer. logits [num_rows, vocabulary]. aux: null, or layers + 1
  // pointers to [num_tokens, hidden] or null, for the hidden states that enter each layer and, normed,
  // the output layer.
  void forward(const Batch& batch, float* const* keys, float* const* values, float* logits,
               float* const* aux = nullptr);
  // Draft autoregressively: `first` computes what the cache lacks, with one row per request; its
  // block table reaches over the drafts.
  void draft(const Batch& first, float* const* keys, float* const* values, const Params& params,
             const DraftRound& round);
  // Measures which fetches of weights are fastest here, and takes them.
  Tuning tune();
  void set_fetches(Fetches fetches) { fetches_ = fetches; }

 private:
  struct Layer {
    std::vector<float> input_norm, post_attention_norm, q_norm, k_norm;
    Packed qkv, o, gate_up, down;
    int64_t window;
  };
  void attention(const Layer& layer, const Batch& batch, float* keys, float* values);
  void mlp(const Layer& layer, int64_t tokens);
  void add_product(const float* input, int64_t tokens, const Packed& w);  // to x_
  void locate(const AttentionBatch& batch);
  void rotate(float* head, int64_t token) const;
  void norm(const float* x, const std::vector<float>& weight, int64_t rows, float* out) const;
  void place(int64_t tokens);
  std::vector<const Packed*> weights() const;  // in the order of a pass
  void draw_drafts(const Params& params, const Batch& first, const DraftRound& round,
                   int64_t i) const;

  DecoderShape shape_;
  Fetches fetches_;
  Arena arena_;
  std::vector<Layer> layers_;
  const float* embedding_;
  std::vector<float> final_norm_, frequencies_;
  Packed head_;
  AttentionPlan plan_;
  std::vector<int64_t> positions_, slots_;  // of each token: in its request, flat in the cache
  // One allocation for the intermediate results of a pass, kept between passes.
  std::vector<float> memory_, draft_logits_;
  float *x_ = nullptr, *normed_ = nullptr, *qkv_ = nullptr, *query_ = nullptr, *mixed_ = nullptr,
        *activated_ = nullptr, *cos_ = nullptr, *sin_ = nullptr;
};

}  // namespace foretoken
