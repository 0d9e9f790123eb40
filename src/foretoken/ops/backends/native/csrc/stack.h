// A stack of decoder layers (Llama and its relatives). With a `FeatureRule`, as in an EAGLE-3 head, q, k
// and v of the first layer have twice as many inputs.
#pragma once

#include "attention.h"
#include "gemm.h"
#include "sampling.h"

namespace foretoken {

// `ops.FeatureRule`: features are the target's hidden states through `fc`.
struct FeatureRule {
  Matrix fc;                  // [hidden, states]
  const float* fc_norm;       // [states], each of `parts` parts normed separately; may be null
  const float* feature_norm;  // [hidden]
  int64_t states, parts, norm_before_residual, norm_output;
};

// Weights in the memory of PyTorch or of a mapped file, and dimensions. Norms, ids, frequencies and the
// embedding must stay as long as the stack lives; matrices and biases are copied by its constructor.
struct Model {
  const Part* embedding;      // [vocabulary or more, hidden]
  Matrix head;
  const float* final_norm;
  const float* frequencies;   // [rotary_size / 2]
  const int64_t* target_ids;  // [outputs]: the token of each; null: output i is token i
  int64_t layers, hidden, intermediate, heads, kv_heads, head_size;
  int64_t rotary_size;  // leading dimensions of a head that are rotated, in two halves
  int64_t outputs, vocabulary;
};

// The weights of one layer; null if the model has none.
struct LayerWeights {
  const float *input_norm, *post_attention_norm;
  const float *q_norm, *k_norm;  // [head_size], over each head
  Matrix qkv, o, gate_up, down;
  const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias;
  int64_t window;
};

// The packed tokens of one pass.
struct Batch {
  const int64_t *token_T, *row_N;  // row_N: tokens that need results; if N = T, all in order
  AttentionBatch attention;
  int64_t num_tokens, num_rows;
};

// The features of a batch: `feature` [num_tokens, hidden]; or null, and the target's hidden states:
// `count` pointers to [_, states / count], of which rows row_T are read (null: in order).
struct Features {
  const float* feature;
  const float* const* states;
  const int64_t* row_T;
  int64_t count;
};

// `ops.stack.Outcome` of a pass of the target: tokens by slot, `width` apart; known tokens of each
// request.
struct Outcome {
  const int32_t* token_SL;
  const int64_t *length_B, *slot_B;
  float* hidden_SC;  // receives the output of each request's last row with a known token after it
  int64_t width;
};

// A round in which each request drafts num_drafts_B[b] tokens, starting from its row of the first pass;
// with a `FeatureRule`, from the output of its last row.
struct DraftRound {
  const int64_t *slot_B, *num_drafts_B;
  int64_t* token_BK;  // [B, most]: receives the drafts, and -1 after a request's last
  const Params* params;
  const Cache* cache;      // receives the q of every draft; null: drafts are the argmax of the logits
  const float* hidden_SC;  // with a `FeatureRule`
  int64_t most, fp64;
};

class Stack {
 public:
  // rule: null if the input is the tokens' vectors.
  Stack(const Model& model, const FeatureRule* rule, const LayerWeights* const* layers,
        float norm_epsilon, float attention_scale, float rotary_scale);

  // All weights that a pass multiplies with, in its order.
  std::vector<const Packed*> weights() const;
  void set_fetches(Fetches fetches) { fetches_ = fetches; }

  // keys, values: one pointer per layer. features: given with a `FeatureRule`. logits: [num_rows,
  // vocabulary], or null to leave them out. hidden: null or [num_rows, hidden], rows' outputs, for
  // `logits_of` and the next rows. aux: null, or layers + 1 pointers to [num_tokens, hidden] or null,
  // for the inputs of each layer and the normed input of the output layer.
  void run(const Batch& batch, const Features* features, float* const* keys, float* const* values,
           float* logits, float* hidden, float* const* aux);
  // With a `FeatureRule`: run rows of a target's pass that have a known token after them, with it.
  void observe(const AttentionBatch& pass, const Outcome& outcome, const Features& features,
               float* const* keys, float* const* values);
  void logits_of(const float* hidden, int64_t rows, float* logits);

  // Draft autoregressively. `first` computes the tokens that the cache lacks, with one row per request;
  // with a `FeatureRule` only its lengths and its block table are read, which has a row per slot. The
  // table covers the drafts.
  void draft(const Batch& first, float* const* keys, float* const* values, const DraftRound& r);

 private:
  struct Layer {
    LayerWeights given;  // its norms and window are used
    std::vector<Packed> qkv;  // one after the other, one for adjacent parts of the same kind
    Packed o, gate_up, down;
  };

  // In layers.cpp. Allocate memory for a pass; its old contents are lost.
  void place(int64_t tokens, int64_t rows);
  // All layers, on x_; afterwards it holds only the rows of row_N, before the last norm.
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
  std::vector<int64_t> positions_, slots_;  // each token's position, and its flat index in the cache
  // One allocation for the intermediate results of a pass, kept between passes.
  std::vector<float> memory_, draft_logits_;
  float *x_ = nullptr, *normed_ = nullptr, *qkv_ = nullptr, *query_ = nullptr, *mixed_ = nullptr,
        *activated_ = nullptr, *cos_ = nullptr, *sin_ = nullptr, *joined_ = nullptr;
};

// weight * x / rms(x), with a fixed order of additions; `out` may be x.
void norm_row(const float* x, const float* weight, int64_t size, float epsilon, float* out);

}  // namespace foretoken
