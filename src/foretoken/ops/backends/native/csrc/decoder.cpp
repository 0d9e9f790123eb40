// One forward pass of a dense decoder (Llama and its relatives): packed tokens in, logits out; a round
// of drafting; how weights are fetched the fastest here.
#include <algorithm>
#include <cmath>

#include "attention.h"
#include "call.h"
#include "gemm.h"
#include "sampling.h"
#include "tuning.h"

namespace foretoken {

// Weights as PyTorch holds them, row-major float32, and dimensions. Norms, frequencies and the
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
  const float *q, *k, *v, *o, *gate, *up, *down;
  const float *q_bias, *k_bias, *v_bias, *o_bias, *gate_bias, *up_bias, *down_bias;
  int64_t window;
};

// The packed tokens of one pass.
struct Batch {
  const int64_t *token_T, *row_N;  // row_N: tokens whose logits are wanted
  AttentionBatch attention;
  int64_t num_tokens, num_rows;
};

// A round of drafting, each request drafting num_drafts_B[b] >= 1 tokens from the row that the first
// pass gives it on.
struct DraftRound {
  const int64_t *slot_B, *num_drafts_B;
  int64_t* token_BK;  // [B, most]: the drafts; entries past num_drafts_B are left alone
  const Params* params;
  const Cache* cache;  // gets the q of every draft; null: drafts are the argmax of the logits
  int64_t most, fp64;
};

namespace {

// weight * x / rms(x), as one fixed order of additions.
void norm_row(const float* x, const float* weight, int64_t size, float epsilon, float* out) {
  Vec squares = {};
  float rest = 0;
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) squares += load(x + i) * load(x + i);
  for (; i < size; i++) rest += x[i] * x[i];
  const float scale = 1.0f / std::sqrt((sum_lanes(squares) + rest) / size + epsilon);
  for (i = 0; i < size; i++) out[i] = weight[i] * (x[i] * scale);
}

// A panel of gate_up holds half a panel of gate, then the same outputs of up.
constexpr int64_t kHalf = kPanel / 2;

int64_t gate_up_outputs(const Model& model) {
  return (model.intermediate + kHalf - 1) / kHalf * kPanel;
}

// Floats that all packed weights take.
int64_t arena_size(const Model& m) {
  const int64_t q = m.heads * m.head_size, kv = m.kv_heads * m.head_size;
  const auto size = [](int64_t outputs, int64_t inputs) {
    return Arena::padded(Packed::size(outputs, inputs));
  };
  return size(m.vocabulary, m.hidden) +
         m.layers * (size(q + 2 * kv, m.hidden) + size(m.hidden, q) +
                     size(gate_up_outputs(m), m.hidden) + size(m.hidden, m.intermediate));
}

// silu(gate) * up, for `count` outputs.
void activate(const float* values, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += kWidth) {
    const Vec gate = load(values + i), up = load(values + kHalf + i);
    const Vec y = gate / (1.0f + exp(-gate)) * up;
    if (i + kWidth <= count) {
      store(out + i, y);
    } else {
      for (int64_t j = i; j < count; j++) out[j] = y[j - i];
    }
  }
}

}  // namespace

class Decoder {
 public:
  Decoder(const Model& model, const LayerWeights* const* layers, float norm_epsilon,
          float attention_scale, float rotary_scale)
      : model_(model),
        norm_epsilon_(norm_epsilon),
        attention_scale_(attention_scale),
        rotary_scale_(rotary_scale),
        arena_(arena_size(model)) {
    const int64_t h = model.hidden, q = model.heads * model.head_size,
                  kv = model.kv_heads * model.head_size;
    for (int64_t l = 0; l < model.layers; l++) {
      const LayerWeights& w = *layers[l];
      Layer layer{w, Packed(q + 2 * kv, h, arena_), Packed(h, q, arena_),
                  Packed(gate_up_outputs(model), h, arena_), Packed(h, model.intermediate, arena_)};
      layer.qkv.fill(0, w.q, w.q_bias, q);
      layer.qkv.fill(q, w.k, w.k_bias, kv);
      layer.qkv.fill(q + kv, w.v, w.v_bias, kv);
      layer.o.fill(0, w.o, w.o_bias, h);
      for (int64_t i = 0; i < layer.gate_up.panels; i++) {
        const int64_t at = i * kHalf, count = std::min(model.intermediate - at, kHalf);
        const float *gate_bias = w.gate_bias ? w.gate_bias + at : nullptr,
                    *up_bias = w.up_bias ? w.up_bias + at : nullptr;
        layer.gate_up.fill(i * kPanel, w.gate + at * h, gate_bias, count);
        layer.gate_up.fill(i * kPanel + kHalf, w.up + at * h, up_bias, count);
      }
      layer.down.fill(0, w.down, w.down_bias, h);
      layers_.push_back(std::move(layer));
    }
    head_ = Packed(model.vocabulary, h, arena_);  // last, as in a pass
    head_.fill(0, model.head, nullptr, model.vocabulary);
  }

  // All that a pass multiplies with, in its order.
  std::vector<const Packed*> weights() const {
    std::vector<const Packed*> all;
    for (const Layer& layer : layers_)
      all.insert(all.end(), {&layer.qkv, &layer.o, &layer.gate_up, &layer.down});
    all.push_back(&head_);
    return all;
  }

  void set_fetches(Fetches fetches) { fetches_ = fetches; }

  // keys, values: one pointer per layer. logits [num_rows, vocabulary]. aux: null, or layers + 1
  // pointers to [num_tokens, hidden] or null, for the hidden states that enter each layer and, normed,
  // the output layer.
  void forward(const Batch& batch, float* const* keys, float* const* values, float* logits,
               float* const* aux = nullptr) {
    const int64_t h = model_.hidden, tokens = batch.num_tokens;
    const size_t layers = layers_.size();
    place(tokens);
    for (int64_t t = 0; t < tokens; t++)
      std::memcpy(x_ + t * h, model_.embedding + batch.token_T[t] * h, h * sizeof(float));
    locate(batch.attention);
    for (size_t i = 0; i < layers; i++) {
      if (aux && aux[i]) std::memcpy(aux[i], x_, tokens * h * sizeof(float));
      attention(layers_[i], batch, keys[i], values[i]);
      mlp(layers_[i], tokens);
    }
    if (aux && aux[layers]) norm(model_.final_norm, tokens, aux[layers]);
    for (int64_t n = 0; n < batch.num_rows; n++)
      norm_row(x_ + batch.row_N[n] * h, model_.final_norm, h, norm_epsilon_, normed_ + n * h);
    product(normed_, batch.num_rows, head_, fetches_, [&](auto row, auto first, auto count, auto y) {
      std::memcpy(logits + row * model_.vocabulary + first, y, count * sizeof(float));
    });
  }

  // Draft autoregressively: `first` computes what the cache lacks, with one row per request; its
  // block table reaches over the drafts.
  void draft(const Batch& first, float* const* keys, float* const* values, const DraftRound& r) {
    const AttentionBatch& known = first.attention;
    draft_logits_.resize(known.requests * model_.vocabulary);
    forward(first, keys, values, draft_logits_.data());
    draw_drafts(known, r, 0);
    std::vector<int64_t> tokens, starts, lengths, blocks;
    for (int64_t i = 1; i < r.most; i++) {
      for (auto* list : {&tokens, &starts, &lengths, &blocks}) list->clear();
      for (int64_t b = 0; b < known.requests; b++) {
        if (r.num_drafts_B[b] <= i) continue;
        starts.push_back(static_cast<int64_t>(tokens.size()));
        tokens.push_back(r.token_BK[b * r.most + i - 1]);
        lengths.push_back(known.length_B[b] + i);
        blocks.insert(blocks.end(), known.blocks(b), known.blocks(b) + known.columns);
      }
      const auto live = static_cast<int64_t>(tokens.size());
      starts.push_back(live);
      const Batch next{tokens.data(), starts.data(),  // every token's logits are wanted
                       {starts.data(), lengths.data(), blocks.data(), live, known.columns,
                        known.block_size},
                       live, live};
      forward(next, keys, values, draft_logits_.data());
      draw_drafts(known, r, i);
    }
  }

 private:
  struct Layer {
    LayerWeights given;  // its norms and window are used
    Packed qkv, o, gate_up, down;
  };

  void place(int64_t tokens) {
    const int64_t q = model_.heads * model_.head_size, kv = model_.kv_heads * model_.head_size;
    const int64_t half = model_.rotary_size / 2;
    const std::pair<float**, int64_t> parts[] = {
        {&x_, model_.hidden}, {&normed_, model_.hidden}, {&qkv_, q + 2 * kv},
        {&query_, q},         {&mixed_, q},              {&activated_, model_.intermediate},
        {&cos_, half},        {&sin_, half}};
    const auto floats = [&](int64_t size) { return size * tokens + 2 * kWidth; };
    int64_t total = 0;
    for (const auto& part : parts) total += floats(part.second);
    if (static_cast<int64_t>(memory_.size()) < total) memory_.resize(total);
    float* next = memory_.data();
    for (const auto& part : parts) {
      *part.first = next;
      next += floats(part.second);
    }
  }

  // Of x_, for `rows` tokens.
  void norm(const float* weight, int64_t rows, float* out) const {
    parallel_for(rows, rows * model_.hidden > 100000, [&](int64_t r) {
      const int64_t at = r * model_.hidden;
      norm_row(x_ + at, weight, model_.hidden, norm_epsilon_, out + at);
    });
  }

  // Where each token stands in its request and in the cache.
  void locate(const AttentionBatch& batch) {
    const int64_t half = model_.rotary_size / 2, width = batch.block_size;
    const int64_t tokens = batch.query_start_B1[batch.requests];
    slots_.resize(tokens);
    positions_.resize(tokens);
    for (int64_t b = 0; b < batch.requests; b++) {
      const int64_t end = batch.query_start_B1[b + 1];
      for (int64_t t = batch.query_start_B1[b]; t < end; t++) {
        const int64_t position = positions_[t] = batch.length_B[b] - (end - t);
        slots_[t] = batch.blocks(b)[position / width] * width + position % width;
      }
    }
    parallel_for(tokens, tokens > 64, [&](int64_t t) {
      for (int64_t i = 0; i < half; i++) {
        const float angle = static_cast<float>(positions_[t]) * model_.frequencies[i];
        cos_[t * half + i] = std::cos(angle) * rotary_scale_;
        sin_[t * half + i] = std::sin(angle) * rotary_scale_;
      }
    });
    plan_attention(batch, model_.heads, model_.kv_heads, &plan_);
  }

  void rotate(float* head, int64_t token) const {
    const int64_t half = model_.rotary_size / 2;
    const float *c = cos_ + token * half, *s = sin_ + token * half;
    for (int64_t i = 0; i < half; i++) {
      const float a = head[i], b = head[half + i];
      head[i] = a * c[i] - b * s[i];
      head[half + i] = b * c[i] + a * s[i];
    }
  }

  void attention(const Layer& layer, const Batch& batch, float* keys, float* values) {
    const int64_t d = model_.head_size, q = model_.heads * d, kv = model_.kv_heads * d;
    const int64_t all = q + 2 * kv, tokens = batch.num_tokens;
    const AttentionShape s{model_.heads, model_.kv_heads, d, d, batch.attention.block_size,
                           attention_scale_, layer.given.window};
    norm(layer.given.input_norm, tokens, normed_);
    product(normed_, tokens, layer.qkv, fetches_, [&](auto row, auto first, auto count, auto y) {
      std::memcpy(qkv_ + row * all + first, y, count * sizeof(float));
    });
    parallel_for(tokens, tokens > 32, [&](int64_t t) {
      float* row = qkv_ + t * all;
      for (int64_t h = 0; h < model_.heads + model_.kv_heads; h++) {
        float* head = row + h * d;
        const float* weight = h < model_.heads ? layer.given.q_norm : layer.given.k_norm;
        if (weight) norm_row(head, weight, d, norm_epsilon_, head);
        rotate(head, t);
      }
      std::memcpy(query_ + t * q, row, q * sizeof(float));
      write_kv(keys, values, slots_[t], row + q, row + q + kv, s);
    });
    attend(query_, keys, values, batch.attention, plan_, s, mixed_);
    add_product(mixed_, tokens, layer.o);
  }

  void mlp(const Layer& layer, int64_t tokens) {
    const int64_t wide = model_.intermediate;
    norm(layer.given.post_attention_norm, tokens, normed_);
    product(normed_, tokens, layer.gate_up, fetches_, [&](auto row, auto first, auto, auto y) {
      const int64_t at = first / 2;
      activate(y, std::min(wide - at, kHalf), activated_ + row * wide + at);
    });
    add_product(activated_, tokens, layer.down);
  }

  // Add input times w to x_.
  void add_product(const float* input, int64_t tokens, const Packed& w) {
    const int64_t h = model_.hidden;
    product(input, tokens, w, fetches_, [&](auto row, auto first, auto count, auto y) {
      for (int64_t i = 0; i < count; i++) x_[row * h + first + i] += y[i];
    });
  }

  // Draft i of every request that still drafts, from its row of `draft_logits_`.
  void draw_drafts(const AttentionBatch& known, const DraftRound& r, int64_t i) const {
    const int64_t size = model_.vocabulary;
    int64_t row = 0;
    for (int64_t b = 0; b < known.requests; b++) {
      if (r.num_drafts_B[b] <= i) continue;
      const Row logits{draft_logits_.data() + size * row++, kFloat32, size};
      const Place place{r.slot_B[b], known.length_B[b] + i, i, size, r.fp64};
      int64_t* token = r.token_BK + b * r.most + i;
      *token = r.cache ? draft_row(*r.params, logits, place, r.cache) : largest(logits).id;
    }
  }

  Model model_;
  float norm_epsilon_, attention_scale_, rotary_scale_;
  Fetches fetches_;
  Arena arena_;
  std::vector<Layer> layers_;
  Packed head_;
  AttentionPlan plan_;
  std::vector<int64_t> positions_, slots_;  // of each token: in its request, flat in the cache
  // One allocation for the intermediate results of a pass, kept between passes.
  std::vector<float> memory_, draft_logits_;
  float *x_ = nullptr, *normed_ = nullptr, *qkv_ = nullptr, *query_ = nullptr, *mixed_ = nullptr,
        *activated_ = nullptr, *cos_ = nullptr, *sin_ = nullptr;
};

extern "C" {

int foretoken_decoder_new(const Model& model, const LayerWeights* const* layers, float norm_epsilon,
                          float attention_scale, float rotary_scale, Decoder** made) {
  return guarded(
      [&] { *made = new Decoder(model, layers, norm_epsilon, attention_scale, rotary_scale); });
}

int foretoken_decoder_free(Decoder* decoder) {
  delete decoder;
  return kDone;
}

int foretoken_decoder_measure_fetches(const Decoder& decoder, Fetches* fastest,
                                      double seconds[2][kFetches]) {
  return guarded([&] { *fastest = measure_fetches(decoder.weights(), seconds); });
}

int foretoken_decoder_set_fetches(Decoder& decoder, Fetch one, Fetch few) {
  decoder.set_fetches({one, few});
  return kDone;
}

int foretoken_decoder_forward(Decoder& decoder, const Batch& batch, float* const* keys,
                              float* const* values, float* logits, float* const* aux) {
  return guarded([&] { decoder.forward(batch, keys, values, logits, aux); });
}

int foretoken_decoder_draft(Decoder& decoder, const Batch& first, float* const* keys,
                            float* const* values, const DraftRound& round) {
  return guarded([&] { decoder.draft(first, keys, values, round); });
}
}

}  // namespace foretoken
