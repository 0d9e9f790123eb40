// A dense decoder (Llama and its relatives), or an EAGLE-3 head, which is a decoder of one layer whose
// q, k and v read twice as much.
#pragma once

#include "attention.h"
#include "gemm.h"
#include "sampling.h"

namespace foretoken {

// What a head has beside it. Its rows are normed tokens beside normed features, which are the target's
// hidden states through `fc`.
struct Eagle {
  const float* fc;            // [hidden, states]
  const float* fc_norm;       // [states], of `parts` parts each by itself; may be null
  const float* hidden_norm;   // of a feature
  const int64_t* target_ids;  // [Model::vocabulary]; null: they are the same
  int64_t states, parts, target_vocabulary;
  int64_t norm_before_residual, norm_output;
};

// Weights as PyTorch holds them, row-major float32, and dimensions. Norms, ids, frequencies and the
// embedding are read there as long as the decoder lives, matrices and biases while it is made.
struct Model {
  const float *embedding, *final_norm, *head;
  const float* frequencies;  // [rotary_size / 2]
  int64_t layers, hidden, intermediate, heads, kv_heads, head_size, vocabulary;
  int64_t rotary_size;  // leading dimensions of a head that are rotated, in two halves
};

// Of one layer; null where a model has none.
struct LayerWeights {
  const float *input_norm, *post_attention_norm;
  const float *q_norm, *k_norm;  // [head_size], over each head
  // qkv: queries, keys, values, one after the other; gate_up: all of gate, then all of up.
  const float *qkv, *o, *gate_up, *down;
  const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias;
  int64_t window;
};

// The packed tokens of one pass.
struct Batch {
  const int64_t *token_T, *row_N;  // row_N: tokens that are wanted; as many as there are: all, in order
  AttentionBatch attention;
  int64_t num_tokens, num_rows;
};

// What rows of a head begin with: `feature` [num_tokens, hidden], or null and the target's hidden
// states, `count` pointers to [_, states / count], of which row_T are read, or null: in order.
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
  float* hidden_SC;  // gets what the last row of each request gives that has a known token behind it
  int64_t width;
};

// A round of drafting, each request drafting num_drafts_B[b] tokens: from the row that the first pass
// gives it on; of a head, from what its last row gave.
struct DraftRound {
  const int64_t *slot_B, *num_drafts_B;
  int64_t* token_BK;  // [B, most]: gets the drafts, and -1 behind a request's last
  const Params* params;
  const Cache* cache;      // gets the q of every draft; null: drafts are the argmax of the logits
  const float* hidden_SC;  // of a head
  int64_t most, fp64;
};

class Decoder {
 public:
  // eagle: null for a model.
  Decoder(const Model& model, const Eagle* eagle, const LayerWeights* const* layers,
          float norm_epsilon, float attention_scale, float rotary_scale);

  // All that a pass multiplies with, in its order.
  std::vector<const Packed*> weights() const;
  void set_fetches(Fetches fetches) { fetches_ = fetches; }

  // keys, values: one pointer per layer. logits [num_rows, vocabulary]. aux: null, or layers + 1
  // pointers to [num_tokens, hidden] or null, for the hidden states that enter each layer and, normed,
  // the output layer.
  void forward(const Batch& batch, float* const* keys, float* const* values, float* logits,
               float* const* aux = nullptr);

  // Of a head: hidden [num_rows, hidden] is what its rows give, for `logits_of` and the next rows.
  void forward_head(const Batch& batch, const Features& features, float* const* keys,
                    float* const* values, float* hidden);
  // Rows of a target's pass that have a known token behind them, each with it.
  void observe(const AttentionBatch& pass, const Outcome& outcome, const Features& features,
               float* const* keys, float* const* values);
  void logits_of(const float* hidden, int64_t rows, float* logits);

  // Draft autoregressively. `first` computes what a model's cache lacks, with one row per request; of a
  // head only its lengths and its block table are read, which has a row per slot. The table reaches
  // over the drafts.
  void draft(const Batch& first, float* const* keys, float* const* values, const DraftRound& r);

 private:
  struct Layer {
    LayerWeights given;  // its norms and window are used
    Packed qkv, o, gate_up, down;
  };

  // In layers.cpp. Memory for a pass; what it held is lost.
  void place(int64_t tokens, int64_t rows);
  // All layers, on x_; of it remain the rows that are wanted, before the last norm.
  void run_layers(const Batch& batch, float* const* keys, float* const* values,
                  float* const* aux = nullptr);
  void locate(const AttentionBatch& batch);
  void rotate(float* head, int64_t token) const;
  void attention(const Layer& layer, const Batch& batch, float* keys, float* values);
  void mlp(const Layer& layer, int64_t rows);
  int64_t keep_wanted(const Batch& batch);
  void norm(const float* weight, int64_t rows, float* out) const;
  void add_product(const float* input, int64_t rows, const Packed& w);

  void join_states(const Features& features, int64_t tokens);
  void join_tokens(const Layer& layer, const Batch& batch);
  void project(int64_t rows, float* logits);
  int64_t columns() const { return is_head_ ? eagle_.target_vocabulary : model_.vocabulary; }

  Model model_;
  Eagle eagle_;
  bool is_head_;
  float norm_epsilon_, attention_scale_, rotary_scale_;
  Fetches fetches_;
  Store store_;
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
