#include "decoder.h"

#include <cmath>

namespace foretoken {
namespace {

std::vector<float> copy(const float* from, int64_t count) {
  return from ? std::vector<float>(from, from + count) : std::vector<float>();
}

Packed pack(Arena& arena, int64_t outputs, int64_t inputs, const float* weight,
            const float* bias) {
  Packed packed(outputs, inputs, arena);
  packed.fill(0, weight, bias, outputs);
  return packed;
}

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

int64_t gate_up_outputs(const DecoderShape& shape) {
  return (shape.intermediate + kHalf - 1) / kHalf * kPanel;
}

// Floats that all packed weights take.
int64_t arena_size(const DecoderShape& s) {
  const int64_t q = s.heads * s.head_size, kv = s.kv_heads * s.head_size;
  const auto size = [](int64_t outputs, int64_t inputs) {
    return Arena::padded(Packed::size(outputs, inputs));
  };
  return size(s.vocabulary, s.hidden) +
         s.layers * (size(q + 2 * kv, s.hidden) + size(s.hidden, q) +
                     size(gate_up_outputs(s), s.hidden) + size(s.hidden, s.intermediate));
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

Decoder::Decoder(const DecoderShape& shape, const LayerWeights* layers, const float* embedding,
                 const float* final_norm, const float* head, const float* frequencies)
    : shape_(shape),
      arena_(arena_size(shape)),
      embedding_(embedding),
      final_norm_(copy(final_norm, shape.hidden)),
      frequencies_(copy(frequencies, shape.rotary_size / 2)) {
  const int64_t h = shape.hidden, d = shape.head_size;
  const int64_t q = shape.heads * d, kv = shape.kv_heads * d;
  for (const LayerWeights* w = layers; w < layers + shape.layers; w++) {
    Layer layer;
    layer.window = w->window;
    layer.input_norm = copy(w->input_norm, h);
    layer.post_attention_norm = copy(w->post_attention_norm, h);
    layer.q_norm = copy(w->q_norm, d);
    layer.k_norm = copy(w->k_norm, d);
    layer.qkv = Packed(q + 2 * kv, h, arena_);
    layer.qkv.fill(0, w->q, w->q_bias, q);
    layer.qkv.fill(q, w->k, w->k_bias, kv);
    layer.qkv.fill(q + kv, w->v, w->v_bias, kv);
    layer.o = pack(arena_, h, q, w->o, w->o_bias);
    layer.gate_up = Packed(gate_up_outputs(shape), h, arena_);
    for (int64_t i = 0; i < layer.gate_up.panels; i++) {
      const int64_t at = i * kHalf, left = shape.intermediate - at;
      const int64_t count = left < kHalf ? left : kHalf;
      const float *gate_bias = w->gate_bias ? w->gate_bias + at : nullptr,
                  *up_bias = w->up_bias ? w->up_bias + at : nullptr;
      layer.gate_up.fill(i * kPanel, w->gate + at * h, gate_bias, count);
      layer.gate_up.fill(i * kPanel + kHalf, w->up + at * h, up_bias, count);
    }
    layer.down = pack(arena_, h, shape.intermediate, w->down, w->down_bias);
    layers_.push_back(std::move(layer));
  }
  head_ = pack(arena_, shape.vocabulary, h, head, nullptr);  // last, as in a pass
}

std::vector<const Packed*> Decoder::weights() const {
  std::vector<const Packed*> all;
  for (const Layer& layer : layers_)
    all.insert(all.end(), {&layer.qkv, &layer.o, &layer.gate_up, &layer.down});
  all.push_back(&head_);
  return all;
}

Tuning Decoder::tune() {
  const Tuning measured = measure_fetches(weights());
  fetches_ = measured.chosen;
  return measured;
}

void Decoder::place(int64_t tokens) {
  const int64_t q = shape_.heads * shape_.head_size, kv = shape_.kv_heads * shape_.head_size;
  const int64_t sizes[] = {shape_.hidden,       shape_.hidden,          q + 2 * kv,
                           q,                   q,                      shape_.intermediate,
                           shape_.rotary_size / 2, shape_.rotary_size / 2};
  float** parts[] = {&x_, &normed_, &qkv_, &query_, &mixed_, &activated_, &cos_, &sin_};
  int64_t total = 0;
  for (int64_t size : sizes) total += size * tokens + 2 * kWidth;
  if (static_cast<int64_t>(memory_.size()) < total) memory_.resize(total);
  float* next = memory_.data();
  for (int i = 0; i < 8; i++) {
    *parts[i] = next;
    next += sizes[i] * tokens + 2 * kWidth;
  }
}

void Decoder::norm(const float* x, const std::vector<float>& weight, int64_t rows,
                   float* out) const {
  parallel_for(rows, rows * shape_.hidden > 100000, [&](int64_t r) {
    const int64_t at = r * shape_.hidden;
    norm_row(x + at, weight.data(), shape_.hidden, shape_.norm_epsilon, out + at);
  });
}

// Where each token stands in its request and in the cache.
void Decoder::locate(const AttentionBatch& batch) {
  const int64_t half = shape_.rotary_size / 2, width = batch.block_size;
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
      const float angle = static_cast<float>(positions_[t]) * frequencies_[i];
      cos_[t * half + i] = std::cos(angle) * shape_.rotary_scale;
      sin_[t * half + i] = std::sin(angle) * shape_.rotary_scale;
    }
  });
  plan_attention(batch, shape_.heads, shape_.kv_heads, &plan_);
}

void Decoder::rotate(float* head, int64_t token) const {
  const int64_t half = shape_.rotary_size / 2;
  const float *c = cos_ + token * half, *s = sin_ + token * half;
  for (int64_t i = 0; i < half; i++) {
    const float a = head[i], b = head[half + i];
    head[i] = a * c[i] - b * s[i];
    head[half + i] = b * c[i] + a * s[i];
  }
}

void Decoder::attention(const Layer& layer, const Batch& batch, float* keys, float* values) {
  const int64_t d = shape_.head_size, q = shape_.heads * d, kv = shape_.kv_heads * d;
  const int64_t all = q + 2 * kv, tokens = batch.num_tokens;
  const AttentionShape s{shape_.heads, shape_.kv_heads, d, d, batch.attention.block_size,
                         shape_.attention_scale, layer.window};
  norm(x_, layer.input_norm, tokens, normed_);
  product(normed_, tokens, layer.qkv, fetches_, [&](auto row, auto first, auto count, auto y) {
    std::memcpy(qkv_ + row * all + first, y, count * sizeof(float));
  });
  parallel_for(tokens, tokens > 32, [&](int64_t t) {
    float* row = qkv_ + t * all;
    for (int64_t h = 0; h < shape_.heads + shape_.kv_heads; h++) {
      float* head = row + h * d;
      const auto& weight = h < shape_.heads ? layer.q_norm : layer.k_norm;
      if (!weight.empty()) norm_row(head, weight.data(), d, shape_.norm_epsilon, head);
      rotate(head, t);
    }
    std::memcpy(query_ + t * q, row, q * sizeof(float));
    write_kv(keys, values, slots_[t], row + q, row + q + kv, s);
  });
  attend(query_, keys, values, batch.attention, plan_, s, mixed_);
  add_product(mixed_, tokens, layer.o);
}

void Decoder::mlp(const Layer& layer, int64_t tokens) {
  const int64_t wide = shape_.intermediate;
  norm(x_, layer.post_attention_norm, tokens, normed_);
  product(normed_, tokens, layer.gate_up, fetches_, [&](auto row, auto first, auto, auto y) {
    const int64_t at = first / 2, count = wide - at < kHalf ? wide - at : kHalf;
    activate(y, count, activated_ + row * wide + at);
  });
  add_product(activated_, tokens, layer.down);
}

void Decoder::add_product(const float* input, int64_t tokens, const Packed& w) {
  const int64_t h = shape_.hidden;
  product(input, tokens, w, fetches_, [&](auto row, auto first, auto count, auto y) {
    for (int64_t i = 0; i < count; i++) x_[row * h + first + i] += y[i];
  });
}

void Decoder::forward(const Batch& batch, float* const* keys, float* const* values,
                      float* logits, float* const* aux) {
  const int64_t h = shape_.hidden, tokens = batch.num_tokens, rows = batch.num_rows;
  const size_t layers = layers_.size();
  place(tokens);
  for (int64_t t = 0; t < tokens; t++)
    std::memcpy(x_ + t * h, embedding_ + batch.token_T[t] * h, h * sizeof(float));
  locate(batch.attention);
  for (size_t i = 0; i < layers; i++) {
    if (aux && aux[i]) std::memcpy(aux[i], x_, tokens * h * sizeof(float));
    attention(layers_[i], batch, keys[i], values[i]);
    mlp(layers_[i], tokens);
  }
  if (aux && aux[layers]) norm(x_, final_norm_, tokens, aux[layers]);
  for (int64_t n = 0; n < rows; n++)
    norm_row(x_ + batch.row_N[n] * h, final_norm_.data(), h, shape_.norm_epsilon, normed_ + n * h);
  product(normed_, rows, head_, fetches_, [&](auto row, auto first, auto count, auto y) {
    std::memcpy(logits + row * shape_.vocabulary + first, y, count * sizeof(float));
  });
}

// Draft i of every request that still drafts, from its row of `draft_logits_`.
void Decoder::draw_drafts(const Params& params, const Batch& first, const DraftRound& r,
                          int64_t i) const {
  const int64_t size = shape_.vocabulary;
  int64_t row = 0;
  for (int64_t b = 0; b < first.attention.requests; b++) {
    if (r.num_drafts_B[b] <= i) continue;
    const Row logits{draft_logits_.data() + size * row++, kFloat32, size};
    const Place place{r.slot_B[b], first.attention.length_B[b] + i, i, size, r.fp64_noise != 0};
    int64_t* token = r.token_BK + b * r.most + i;
    *token = r.cache ? draft_row(params, logits, place, r.cache) : largest(logits).id;
  }
}

void Decoder::draft(const Batch& first, float* const* keys, float* const* values,
                    const Params& params, const DraftRound& r) {
  const AttentionBatch& known = first.attention;
  draft_logits_.resize(known.requests * shape_.vocabulary);
  forward(first, keys, values, draft_logits_.data());
  draw_drafts(params, first, r, 0);
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
    const Batch next{tokens.data(), starts.data(), live, live,  // every token's logits are wanted
                     {starts.data(), lengths.data(), blocks.data(), live, known.columns,
                      known.block_size}};
    forward(next, keys, values, draft_logits_.data());
    draw_drafts(params, first, r, i);
  }
}

}  // namespace foretoken
