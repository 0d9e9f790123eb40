// A stack of decoder layers (Llama and its relatives). With a `FeatureRule`, as an EAGLE-3 head has one,
// q, k and v of its first layer read twice as much.
#pragma once

#include "attention.h"
#include "gemm.h"
#include "sampling.h"

namespace foretoken {

// What rows begin with, see `ops.FeatureRule`: the target's hidden states through `fc`.
struct FeatureRule {
  Matrix fc;                  // [hidden, states]
  const float* fc_norm;       // [states], of `parts` parts each by itself; may be null
  const float* feature_norm;  // [hidden]
  int64_t states, parts, norm_before_residual, norm_output;
};

// Weights where PyTorch or a mapped file has them, and dimensions. Norms, ids, frequencies and the
// embedding are read there as long as the stack lives, matrices and biases while it is made.
struct Model {
  const Part* embedding;      // [vocabulary or more, hidden]
  Matrix head;
  const float* final_norm;
  const float* frequencies;   // [rotary_size / 2]
  const int64_t* target_ids;  // [outputs]: the token of each; null: they are the same
  int64_t layers, hidden, intermediate, heads, kv_heads, head_size;
  int64_t rotary_size;  // leading dimensions of a head that are rotated, in two halves
  int64_t outputs, vocabulary;
};

// Of one layer; null where a model has none.
struct LayerWeights {
  const float *input_norm, *post_attention_norm;
  const float *q_norm, *k_norm;  // [head_size], over each head
  Matrix qkv, o, gate_up, down;
  const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias;
  int64_t window;
};

// The packed tokens of one pass.
struct Batch {
  const int64_t *token_T, *row_N;  // row_N: tokens that are wanted; as many as there are: all, in order
  AttentionBatch attention;
  int64_t num_tokens, num_rows;
};

// What rows begin with, by the `FeatureRule`: `feature` [num_tokens, hidden], or null and the target's
// hidden states, `count` pointers to [_, states / count], of which row_T are read, or null: in order.
struct Features {
  const float* feature;
  const float* const* states;
  const int64_t* row_T;
  int64_t count;
};

// What became of a pass of the target: tokens by slot, `width` apart; how many are known of each
// request.
struct Outcome {
  const int32_t* token_SL;
  const int64_t *length_B, *slot_B;
  float* hidden_SC;  // gets what the last row of each request gives that has a known token after it
  int64_t width;
};

// A round of drafting, each request drafting num_drafts_B[b] tokens: from the row that the first pass
// gives it on; with a `FeatureRule`, from what its last row gave.
struct DraftRound {
  const int64_t *slot_B, *num_drafts_B;
  int64_t* token_BK;  // [B, most]: gets the drafts, and -1 after a request's last
  const Params* params;
  const Cache* cache;      // gets the q of every draft; null: drafts are the argmax of the logits
  const float* hidden_SC;  // with a `FeatureRule`
  int64_t most, fp64;
};

class Stack {
 public:
  // rule: null if rows begin with their tokens' vectors.
  Stack(const Model& model, const FeatureRule* rule, const LayerWeights* const* layers,
        float norm_epsilon, float attention_scale, float rotary_scale);

  // All that a pass multiplies with, in its order.
  std::vector<const Packed*> weights() const;
  void set_fetches(Fetches fetches) { fetches_ = fetches; }

  // keys, values: one pointer per layer. features: if there is a `FeatureRule`. logits [num_rows,
  // vocabulary], or null: not wanted. hidden [num_rows, hidden], or null: what rows give, for
  // `logits_of` and the next rows. aux: null, or layers + 1 pointers to [num_tokens, hidden] or null,
  // for the hidden states that enter each layer and, normed, the output layer.
  void run(const Batch& batch, const Features* features, float* const* keys, float* const* values,
           float* logits, float* hidden, float* const* aux);
  // With a `FeatureRule`: rows of a target's pass that have a known token after them, each with it.
  void observe(const AttentionBatch& pass, const Outcome& outcome, const Features& features,
               float* const* keys, float* const* values);
  void logits_of(const float* hidden, int64_t rows, float* logits);

  // Draft autoregressively. `first` computes what the cache lacks, with one row per request; with a
  // `FeatureRule` only its lengths and its block table are read, which has a row per slot. The table
  // reaches over the drafts.
  void draft(const Batch& first, float* const* keys, float* const* values, const DraftRound& r);

 private:
  struct Layer {
    LayerWeights given;  // its norms and window are used
    std::vector<Packed> qkv;  // one after the other, each of parts of one kind
    Packed o, gate_up, down;
  };

  // In layers.cpp. Memory for a pass; what it held is lost.
  void place(int64_t tokens, int64_t rows);
  // All layers, on x_; of it remain the rows that are wanted, before the last norm.
  void run_layers(const Batch& batch, float* const* keys, float* const* values,
                  float* const* aux);
  void locate(const AttentionBatch& batch);
  void rotate(float* head, int64_t token) const;
  void attention(const Layer& layer, const Batch& batch, float* keys, float* values);
  void mlp(const Layer& layer, int64_t rows);
  int64_t keep_wanted(const Batch& batch);
  void norm(const float* weight, int64_t rows, float* out) const;
  void add_product(const float* input, int64_t rows, const Packed& w);

  void embed(int64_t token, float* out) const;
  void join_states(const Features& features, int64_t tokens);
  void join_tokens(const Layer& layer, const Batch& batch);
  void project(int64_t rows, float* logits);

  Model model_;
  FeatureRule rule_;
  bool has_rule_;
  float norm_epsilon_, attention_scale_, rotary_scale_;
  Fetches fetches_;
  Arena arena_;
  std::vector<Layer> layers_;
  Packed fc_, head_;
  AttentionPlan plan_;
  std::vector<int64_t> positions_, slots_;  // of each token: in its request, flat in the cache
  // One allocation for the intermediate results of a pass, kept between passes.
  std::vector<float> memory_, draft_logits_;
  float *x_ = nullptr, *normed_ = nullptr, *qkv_ = nullptr, *query_ = nullptr, *mixed_ = nullptr,
        *activated_ = nullptr, *cos_ = nullptr, *sin_ = nullptr, *joined_ = nullptr;
};

// weight * x / rms(x), as one fixed order of additions; `out` may be x.
void norm_row(const float* x, const float* weight, int64_t size, float epsilon, float* out);

}  // namespace foretoken
