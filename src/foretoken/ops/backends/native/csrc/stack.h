// A stack of decoder layers of Llama and similar models, and its attention. With a `FeatureRule`, as in
// an EAGLE-3 head, q, k and v of the first layer have twice as many inputs.
#pragma once
#include "gemm.h"
#include "sampling.h"

namespace foretoken {
// `ops.AttentionBatch`.
struct AttentionBatch {
  const int64_t* query_start_B1;  // first new token of each request, then the number of tokens
  const int64_t* length_B;        // tokens in the cache, including the new ones
  const int64_t* block_BL;        // [requests, columns] block ids
  int64_t requests, columns, block_size;

  int64_t queries(int64_t b) const { return query_start_B1[b + 1] - query_start_B1[b]; }
  const int64_t* blocks(int64_t b) const { return block_BL + b * columns; }
};

// Layout of the cache of a layer: keys [block][kv head][key_size][block_size], so that a vector holds
// one dimension of several keys (up to 15 numbers after the last key are read but not used); values
// [block][kv head][block_size][value_size].
struct AttentionShape {
  int64_t heads, kv_heads, key_size, value_size, block_size;
  float scale;
  int64_t window;  // keys that a query sees, including its own; 0: all
};

// A unit of work for one thread: new tokens of a request, in the heads that share a K/V head.
struct TileRange {
  int64_t request, kv_head, first_token, tokens;
};

// A batch divided into tiles, the same for all layers.
struct AttentionPlan {
  std::vector<TileRange> tiles;
  int64_t num_scores;  // upper bound, per head: as if every query saw all keys of its request
};

void plan_attention(const AttentionBatch& batch, int64_t heads, int64_t kv_heads, AttentionPlan* plan);

// query [T, heads, key_size] to out [T, heads, value_size].
void attend(const float* query, const float* keys, const float* values,
            const AttentionBatch& batch, const AttentionPlan& plan, const AttentionShape& shape,
            float* out);

// Write keys [kv_heads, key_size] and values [kv_heads, value_size] of a token to flat index `slot`.
void write_kv(float* keys, float* values, int64_t slot, const float* key, const float* value,
              const AttentionShape& shape);

// `ops.FeatureRule`: features are the target's hidden states, multiplied with `fc`.
struct FeatureRule {
  Matrix fc;                  // [hidden, states]
  const float* fc_norm;       // [states] in `parts` parts that are normed separately; may be null
  const float* feature_norm;  // [hidden]
  int64_t states, parts, norm_before_residual, norm_output;
};

// Weights in the memory of PyTorch or of a mapped file, and dimensions. Norms, ids, frequencies and the
// embedding must live as long as the stack, whose constructor copies matrices and biases.
struct Model {
  const Part* embedding;      // [vocabulary or more, hidden]
  Matrix head;
  const float* final_norm;
  const float* frequencies;   // [rotary_size / 2]
  const int64_t* target_ids;  // [outputs]: the token of each output; null: output i is token i
  int64_t layers, hidden, intermediate, heads, kv_heads, head_size;
  int64_t rotary_size;  // leading dimensions of a head that RoPE rotates, in two halves
  int64_t outputs, vocabulary;
};

// The weights of one layer; null where the model has none.
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

// The features of a batch: `feature` [num_tokens, hidden]; or, if null, the target's hidden states:
// `count` pointers to [_, states / count], of which rows row_T are read (null: all in order).
struct Features {
  const float* feature;
  const float* const* states;
  const int64_t* row_T;
  int64_t count;
};

// `ops.stack.Outcome` of a pass of the target.
struct Outcome {
  const int32_t* token_SL;  // L = width
  const int64_t *length_B, *slot_B;  // length_B: known tokens
  float* hidden_SC;  // written: the output of each request's last row with a known token after it
  int64_t width;
};

// `ops.stack.DraftRound`.
struct DraftRound {
  const int64_t *slot_B, *num_drafts_B;
  int64_t* token_BK;  // [B, most], written: the drafts, then -1
  const Params* params;
  const Cache* cache;      // written: the q of every draft; null: drafts are the argmax of the logits
  const float* hidden_SC;  // with a `FeatureRule`: from which the first draft is made
  int64_t most, fp64;
};

class Stack {
 public:
  Stack(const Model& model, const FeatureRule* rule, const LayerWeights* const* layers,
        float norm_epsilon, float attention_scale, float rotary_scale);

  // The weights that a pass multiplies with, in this order.
  std::vector<const Packed*> weights() const;
  void set_fetches(Fetches fetches) { fetches_ = fetches; }

  // keys, values: a pointer per layer. features: null without a `FeatureRule`. Written unless null:
  // logits [num_rows, vocabulary]; hidden [num_rows, hidden], the outputs of rows; aux, layers + 1
  // pointers to [num_tokens, hidden] or null: inputs of layers, the normed input of the output layer.
  void run(const Batch& batch, const Features* features, float* const* keys, float* const* values,
           float* logits, float* hidden, float* const* aux);
  // With a `FeatureRule`: run the rows of a target's pass that have a known token after them.
  void observe(const AttentionBatch& pass, const Outcome& outcome, const Features& features,
               float* const* keys, float* const* values);
  void logits_of(const float* hidden, int64_t rows, float* logits);

  // Draft autoregressively. `first` computes the tokens that the cache lacks, with a row per request;
  // its block table covers the drafts. With a `FeatureRule` only lengths and a table by slot are read.
  void draft(const Batch& first, float* const* keys, float* const* values, const DraftRound& r);

 private:
  struct Layer {
    LayerWeights weights;  // norms and window are used
    std::vector<Packed> qkv;  // one for each run of parts of the same kind
    Packed o, gate_up, down;
  };

  // In layers.cpp. Allocate memory for a pass; its old contents are lost.
  void allocate(int64_t tokens, int64_t rows);
  // Run all layers on x_, which then holds only the rows of row_N, before the last norm.
  void run_layers(const Batch& batch, float* const* keys, float* const* values, float* const* aux);
  void locate_tokens(const AttentionBatch& batch);
  void rotate(float* head, int64_t token) const;
  void attention(const Layer& layer, const Batch& batch, float* keys, float* values);
  void mlp(const Layer& layer, int64_t rows);
  int64_t keep_rows(const Batch& batch);
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
  // memory_: all intermediate results of a pass, to which the pointers below point.
  std::vector<float> memory_, draft_logits_;
  float *x_ = nullptr, *normed_ = nullptr, *qkv_ = nullptr, *query_ = nullptr, *mixed_ = nullptr,
        *activated_ = nullptr, *cos_ = nullptr, *sin_ = nullptr, *joined_ = nullptr;
};

// weight * x / rms(x), in a fixed order of additions; `out` may be `x`.
void norm_row(const float* x, const float* weight, int64_t size, float epsilon, float* out);
}  // namespace foretoken
