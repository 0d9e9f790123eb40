// The layers of a stack: packing their weights, and a pass through them.
#include <algorithm>
#include <cmath>
#include "stack.h"

namespace foretoken {
namespace {
// A panel of gate_up holds half a panel of gate, then the same outputs of up.
constexpr int64_t kHalf = kPanel / 2;

int64_t gate_up_outputs(const Model& model) {
  return (model.intermediate + kHalf - 1) / kHalf * kPanel;
}

// Whether every number in a row of floats is a bfloat16.
bool fits_bfloat16(const FileRow& row, int64_t inputs) {
  uint32_t lost = 0;
  for (int64_t k = 0; k < inputs; k++) {
    uint32_t bits;
    std::memcpy(&bits, row.data + k * sizeof bits, sizeof bits);
    lost |= bits & 0xffffu;
  }
  return !lost;
}

// The kind in which a matrix is packed: as stored, but bfloat16 if all its floats are bfloat16 numbers.
Kind packed_kind(const Matrix& matrix, int64_t inputs) {
  const auto kind = static_cast<Kind>(matrix.parts[0]->kind);
  if (kind != kF32) return kind;
  for (int64_t n = 0, rows = rows_of(matrix); n < rows; n++)
    if (!fits_bfloat16(row_of(matrix, n), inputs)) return kF32;
  return kBF16;
}

// The matrix, split into runs of parts of the same kind.
std::vector<Matrix> split_by_kind(const Matrix& matrix) {
  std::vector<Matrix> runs;
  for (int64_t i = 0; i < matrix.count; i++) {
    const Part *part = matrix.parts[i], *last = i ? matrix.parts[i - 1] : nullptr;
    if (last && last->kind == part->kind && last->group == part->group) runs.back().count++;
    else runs.push_back({matrix.parts + i, 1});
  }
  return runs;
}

struct Unpacked {
  Matrix matrix;
  int64_t outputs, inputs;
  Kind kind;
};

// The matrices of a stack, in the order of a pass. After `add` of all, each `next` gives one its memory.
class Packing {
 public:
  void add(const Matrix& matrix, int64_t inputs, int64_t outputs = 0) {
    if (!outputs) outputs = rows_of(matrix);
    const Unpacked one{matrix, outputs, inputs, packed_kind(matrix, inputs)};
    unpacked_.push_back(one);
    size_ += Arena::padded(Packed::size(outputs, inputs, one.kind, matrix.parts[0]->group));
  }
  int64_t size() const { return size_; }
  Packed next(Arena& arena) {
    const Unpacked& one = unpacked_[taken_++];
    return {one.outputs, one.inputs, one.kind, one.matrix.parts[0]->group, arena};
  }

 private:
  std::vector<Unpacked> unpacked_;
  int64_t size_ = 0;
  size_t taken_ = 0;
};

Packing packing_of(const Model& m, const FeatureRule* rule, const LayerWeights* const* layers) {
  Packing all;
  if (rule) all.add(rule->fc, rule->states);
  for (int64_t l = 0; l < m.layers; l++) {
    const LayerWeights& w = *layers[l];
    for (const Matrix& run : split_by_kind(w.qkv)) all.add(run, (rule ? 2 : 1) * m.hidden);
    all.add(w.o, m.heads * m.head_size);
    all.add(w.gate_up, m.hidden, gate_up_outputs(m));
    all.add(w.down, m.intermediate);
  }
  all.add(m.head, m.hidden);
  return all;
}

// silu(gate) * up, for `count` outputs of a panel of gate_up.
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

void norm_row(const float* x, const float* weight, int64_t size, float epsilon, float* out) {
  Vec squares = {};
  float rest = 0;
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) squares += load(x + i) * load(x + i);
  for (; i < size; i++) rest += x[i] * x[i];
  const float scale = 1.0f / std::sqrt((sum_lanes(squares) + rest) / size + epsilon);
  for (i = 0; i < size; i++) out[i] = weight[i] * (x[i] * scale);
}

Stack::Stack(const Model& model, const FeatureRule* rule, const LayerWeights* const* layers,
                 float norm_epsilon, float attention_scale, float rotary_scale)
    : model_(model), rule_(rule ? *rule : FeatureRule{}), has_rule_(rule), norm_epsilon_(norm_epsilon),
      attention_scale_(attention_scale), rotary_scale_(rotary_scale) {
  Packing packing = packing_of(model, rule, layers);
  arena_ = Arena(packing.size());
  const auto in_order = [](int64_t output) { return output; };
  if (has_rule_) {
    fc_ = packing.next(arena_);
    fc_.fill(rule_.fc, nullptr, in_order);
  }
  for (int64_t l = 0; l < model.layers; l++) {
    const LayerWeights& w = *layers[l];
    Layer layer{w, {}, {}, {}, {}};
    const float* bias = w.qkv_bias;
    for (const Matrix& run : split_by_kind(w.qkv)) {
      layer.qkv.push_back(packing.next(arena_));
      layer.qkv.back().fill(run, bias, in_order);
      if (bias) bias += rows_of(run);
    }
    layer.o = packing.next(arena_);
    layer.o.fill(w.o, w.o_bias, in_order);
    layer.gate_up = packing.next(arena_);
    layer.gate_up.fill(w.gate_up, w.gate_up_bias, [&](int64_t output) -> int64_t {
      const int64_t at = output / kPanel * kHalf + output % kHalf;
      if (at >= model.intermediate) return -1;
      return output % kPanel < kHalf ? at : model.intermediate + at;
    });
    layer.down = packing.next(arena_);
    layer.down.fill(w.down, w.down_bias, in_order);
    layers_.push_back(std::move(layer));
  }
  head_ = packing.next(arena_);
  head_.fill(model.head, nullptr, in_order);
}

std::vector<const Packed*> Stack::weights() const {
  std::vector<const Packed*> all;
  if (has_rule_) all.push_back(&fc_);
  for (const Layer& layer : layers_) {
    for (const Packed& part : layer.qkv) all.push_back(&part);
    all.insert(all.end(), {&layer.o, &layer.gate_up, &layer.down});
  }
  all.push_back(&head_);
  return all;
}

void Stack::allocate(int64_t tokens, int64_t rows) {
  const int64_t q = model_.heads * model_.head_size, kv = model_.kv_heads * model_.head_size;
  const int64_t half = model_.rotary_size / 2, inputs = has_rule_ ? 2 * model_.hidden : model_.hidden;
  const std::pair<float**, int64_t> parts[] = {
      {&x_, model_.hidden}, {&normed_, inputs}, {&qkv_, q + 2 * kv},
      {&query_, q},         {&mixed_, q},       {&activated_, model_.intermediate},
      {&cos_, half},        {&sin_, half},      {&joined_, rule_.states}};
  const auto floats = [&](int64_t size) { return size * std::max(tokens, rows) + 2 * kWidth; };
  int64_t total = 0;
  for (const auto& part : parts) total += floats(part.second);
  if (static_cast<int64_t>(memory_.size()) < total) memory_.resize(total);
  float* next = memory_.data();
  for (const auto& part : parts) {
    *part.first = next;
    next += floats(part.second);
  }
}

void Stack::run_layers(const Batch& batch, float* const* keys, float* const* values,
                         float* const* aux) {
  const int64_t h = model_.hidden;
  const size_t layers = layers_.size();
  locate_tokens(batch.attention);
  int64_t rows = batch.num_tokens;
  for (size_t i = 0; i < layers; i++) {
    if (aux && aux[i]) std::memcpy(aux[i], x_, rows * h * sizeof(float));
    attention(layers_[i], batch, keys[i], values[i]);
    if (i + 1 == layers && !(aux && aux[layers])) rows = keep_rows(batch);
    add_product(mixed_, rows, layers_[i].o);
    mlp(layers_[i], rows);
  }
  if (aux && aux[layers]) {
    norm(model_.final_norm, rows, aux[layers]);
    keep_rows(batch);
  }
  if (rule_.norm_output) norm(model_.final_norm, batch.num_rows, x_);
}

// Keep only the rows of row_N in x_ and mixed_; returns their number.
int64_t Stack::keep_rows(const Batch& batch) {
  const int64_t h = model_.hidden, q = model_.heads * model_.head_size;
  if (batch.num_rows == batch.num_tokens) return batch.num_rows;
  for (int64_t n = 0; n < batch.num_rows; n++) {
    std::memcpy(normed_ + n * h, x_ + batch.row_N[n] * h, h * sizeof(float));
    std::memcpy(query_ + n * q, mixed_ + batch.row_N[n] * q, q * sizeof(float));
  }
  std::swap(x_, normed_);
  std::swap(query_, mixed_);
  return batch.num_rows;
}

// Norm the first `rows` rows of x_, into `out`.
void Stack::norm(const float* weight, int64_t rows, float* out) const {
  parallel_for(rows, rows * model_.hidden > 100000, [&](int64_t r) {
    const int64_t at = r * model_.hidden;
    norm_row(x_ + at, weight, model_.hidden, norm_epsilon_, out + at);
  });
}

// Compute the positions of tokens, their flat indices in the cache, RoPE's angles, and the plan.
void Stack::locate_tokens(const AttentionBatch& batch) {
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

void Stack::rotate(float* head, int64_t token) const {
  const int64_t half = model_.rotary_size / 2;
  const float *c = cos_ + token * half, *s = sin_ + token * half;
  for (int64_t i = 0; i < half; i++) {
    const float a = head[i], b = head[half + i];
    head[i] = a * c[i] - b * s[i];
    head[half + i] = b * c[i] + a * s[i];
  }
}

void Stack::attention(const Layer& layer, const Batch& batch, float* keys, float* values) {
  const int64_t d = model_.head_size, q = model_.heads * d, kv = model_.kv_heads * d;
  const int64_t all = q + 2 * kv, tokens = batch.num_tokens;
  const AttentionShape s{model_.heads, model_.kv_heads, d, d, batch.attention.block_size,
                         attention_scale_, layer.weights.window};
  if (has_rule_) join_tokens(layer, batch);
  else norm(layer.weights.input_norm, tokens, normed_);
  float* out = qkv_;
  for (const Packed& part : layer.qkv) {
    product(normed_, tokens, part, fetches_, [&](auto row, auto first, auto count, auto y) {
      std::memcpy(out + row * all + first, y, count * sizeof(float));
    });
    out += part.outputs;
  }
  parallel_for(tokens, tokens > 32, [&](int64_t t) {
    float* row = qkv_ + t * all;
    for (int64_t h = 0; h < model_.heads + model_.kv_heads; h++) {
      float* head = row + h * d;
      const float* weight = h < model_.heads ? layer.weights.q_norm : layer.weights.k_norm;
      if (weight) norm_row(head, weight, d, norm_epsilon_, head);
      rotate(head, t);
    }
    std::memcpy(query_ + t * q, row, q * sizeof(float));
    write_kv(keys, values, slots_[t], row + q, row + q + kv, s);
  });
  attend(query_, keys, values, batch.attention, plan_, s, mixed_);
}

void Stack::mlp(const Layer& layer, int64_t rows) {
  const int64_t wide = model_.intermediate;
  norm(layer.weights.post_attention_norm, rows, normed_);
  product(normed_, rows, layer.gate_up, fetches_, [&](auto row, auto first, auto, auto y) {
    const int64_t at = first / 2;
    activate(y, std::min(wide - at, kHalf), activated_ + row * wide + at);
  });
  add_product(activated_, rows, layer.down);
}

// Add input times w to x_.
void Stack::add_product(const float* input, int64_t rows, const Packed& w) {
  const int64_t h = model_.hidden;
  product(input, rows, w, fetches_, [&](auto row, auto first, auto count, auto y) {
    for (int64_t i = 0; i < count; i++) x_[row * h + first + i] += y[i];
  });
}
}  // namespace foretoken
