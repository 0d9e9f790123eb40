// The passes of a stack, its rounds of drafting, and the functions that Python calls.
#include "stack.h"
#include <algorithm>

namespace foretoken {
void Stack::run(const Batch& batch, const Features* features, float* const* keys,
                float* const* values, float* logits, float* hidden, float* const* aux) {
  const int64_t h = model_.hidden;
  allocate(batch.num_tokens, batch.num_rows);
  if (!features) {
    for (int64_t t = 0; t < batch.num_tokens; t++) embed(batch.token_T[t], x_ + t * h);
  } else if (features->feature) {
    std::memcpy(x_, features->feature, batch.num_tokens * h * sizeof(float));
  } else {
    join_states(*features, batch.num_tokens);
  }
  run_layers(batch, keys, values, aux);
  if (hidden) std::memcpy(hidden, x_, batch.num_rows * h * sizeof(float));
  if (logits) project(batch.num_rows, logits);
}

void Stack::observe(const AttentionBatch& pass, const Outcome& outcome, const Features& features,
                      float* const* keys, float* const* values) {
  const int64_t h = model_.hidden;
  std::vector<int64_t> tokens, rows, starts, lengths, last_rows;
  for (int64_t b = 0; b < pass.requests; b++) {
    const int64_t slot = outcome.slot_B[b], end = pass.query_start_B1[b + 1];
    const int64_t first = pass.length_B[b] - pass.queries(b);
    const int64_t last = std::min(pass.length_B[b] - 1, outcome.length_B[b] - 2);
    starts.push_back(static_cast<int64_t>(tokens.size()));
    for (int64_t i = first; i <= std::max(first, last); i++) {  // at least one row per request
      const int64_t next = std::min(i + 1, outcome.width - 1);
      tokens.push_back(std::max(outcome.token_SL[slot * outcome.width + next], 0));
      rows.push_back(end - pass.length_B[b] + i);
    }
    last_rows.push_back(static_cast<int64_t>(tokens.size()) - 1);
    lengths.push_back(std::max(first, last) + 1);
  }
  const auto count = static_cast<int64_t>(tokens.size());
  starts.push_back(count);
  const Batch batch{tokens.data(), last_rows.data(),
                    {starts.data(), lengths.data(), pass.block_BL, pass.requests, pass.columns,
                     pass.block_size},
                    count, pass.requests};
  allocate(count, pass.requests);
  join_states({nullptr, features.states, rows.data(), features.count}, count);
  run_layers(batch, keys, values, nullptr);
  for (int64_t b = 0; b < pass.requests; b++)
    std::memcpy(outcome.hidden_SC + outcome.slot_B[b] * h, x_ + b * h, h * sizeof(float));
}

void Stack::logits_of(const float* hidden, int64_t rows, float* logits) {
  allocate(rows, rows);
  std::memcpy(x_, hidden, rows * model_.hidden * sizeof(float));
  project(rows, logits);
}

void Stack::draft(const Batch& first, float* const* keys, float* const* values, const DraftRound& r) {
  const AttentionBatch& known = first.attention;
  const int64_t h = model_.hidden;
  draft_logits_.resize(known.requests * model_.vocabulary);
  std::fill_n(r.token_BK, known.requests * r.most, -1);
  std::vector<float> hidden(has_rule_ ? known.requests * h : 0);  // latest output of each request
  std::vector<int64_t> drafting, tokens, starts, lengths, blocks;  // drafting: requests
  for (int64_t i = 0; i < r.most; i++) {
    for (auto* list : {&drafting, &tokens, &starts, &lengths, &blocks}) list->clear();
    for (int64_t b = 0; b < known.requests; b++) {
      if (r.num_drafts_B[b] <= i) continue;
      starts.push_back(static_cast<int64_t>(drafting.size()));
      drafting.push_back(b);
      // Without a largest logit, since none is finite, the draft is -1, which the embedding lacks.
      tokens.push_back(i ? std::max<int64_t>(r.token_BK[b * r.most + i - 1], 0) : 0);
      lengths.push_back(known.length_B[b] + i - has_rule_);  // a rule's row reads the token after it
      const int64_t* row = known.blocks(has_rule_ ? r.slot_B[b] : b);
      blocks.insert(blocks.end(), row, row + known.columns);
    }
    const auto count = static_cast<int64_t>(drafting.size());
    starts.push_back(count);
    const Batch next{tokens.data(), starts.data(),  // every token needs results
                     {starts.data(), lengths.data(), blocks.data(), count, known.columns,
                      known.block_size},
                     count, count};
    if (has_rule_) {
      allocate(count, count);
      for (int64_t n = 0; n < count; n++)
        std::memcpy(x_ + n * h, i ? &hidden[drafting[n] * h] : r.hidden_SC + r.slot_B[drafting[n]] * h,
                    h * sizeof(float));
      if (i) run_layers(next, keys, values, nullptr);
      for (int64_t n = 0; n < count; n++)
        std::memcpy(&hidden[drafting[n] * h], x_ + n * h, h * sizeof(float));
      project(count, draft_logits_.data());
    } else {
      run(i ? next : first, nullptr, keys, values, draft_logits_.data(), nullptr, nullptr);
    }
    for (int64_t n = 0; n < count; n++) {
      const int64_t b = drafting[n];
      const Row logits{draft_logits_.data() + n * model_.vocabulary, kFloat32, model_.vocabulary};
      const NoiseName name{r.slot_B[b], known.length_B[b] + i, i, model_.vocabulary, r.fp64};
      int64_t* token = r.token_BK + b * r.most + i;
      *token = r.cache ? draft_row(*r.params, logits, name, r.cache) : largest(logits).id;
    }
  }
}

void Stack::embed(int64_t token, float* out) const {
  decode_row(row_of(*model_.embedding, token), model_.hidden, out);
}

// Compute the features of rows from the target's hidden states, into x_.
void Stack::join_states(const Features& features, int64_t tokens) {
  const int64_t h = model_.hidden, all = rule_.states, size = all / features.count;
  parallel_for(tokens, tokens * all > 100000, [&](int64_t t) {
    float* joined = joined_ + t * all;
    const int64_t row = features.row_T ? features.row_T[t] : t;
    for (int64_t i = 0; i < features.count; i++)
      std::memcpy(joined + i * size, features.states[i] + row * size, size * sizeof(float));
    const int64_t part = all / rule_.parts;
    for (int64_t at = 0; rule_.fc_norm && at < all; at += part)
      norm_row(joined + at, rule_.fc_norm + at, part, norm_epsilon_, joined + at);
  });
  product(joined_, tokens, fc_, fetches_, [&](auto row, auto first, auto count, auto y) {
    std::memcpy(x_ + row * h + first, y, count * sizeof(float));
  });
}

// The input of q, k and v of the first layer, into normed_: the embedding and the feature of each token.
void Stack::join_tokens(const Layer& layer, const Batch& batch) {
  const int64_t h = model_.hidden;
  parallel_for(batch.num_tokens, batch.num_tokens * h > 50000, [&](int64_t t) {
    float *both = normed_ + 2 * t * h, *feature = x_ + t * h;
    embed(batch.token_T[t], both);
    norm_row(both, layer.weights.input_norm, h, norm_epsilon_, both);
    norm_row(feature, rule_.feature_norm, h, norm_epsilon_, both + h);
    if (rule_.norm_before_residual) std::memcpy(feature, both + h, h * sizeof(float));
  });
}

// Logits of the first `rows` rows of x_; -inf for tokens without an output in the output layer.
void Stack::project(int64_t rows, float* logits) {
  const int64_t *ids = model_.target_ids, size = model_.vocabulary;
  const float* input = x_;
  if (!rule_.norm_output) {
    norm(model_.final_norm, rows, normed_);
    input = normed_;
  }
  if (ids) std::fill_n(logits, rows * size, kMinusInfinity);
  product(input, rows, head_, fetches_, [&](auto row, auto first, auto count, auto y) {
    float* out = logits + row * size;
    if (!ids) std::memcpy(out + first, y, count * sizeof(float));
    for (int64_t j = 0; ids && j < count; j++) out[ids[first + j]] = y[j];
  });
}

extern "C" {
int foretoken_stack_new(const Model& model, const FeatureRule* rule, const LayerWeights* const* layers,
                          float norm_epsilon, float attention_scale, float rotary_scale,
                          Stack** made) {
  return guarded([&] {
    *made = new Stack(model, rule, layers, norm_epsilon, attention_scale, rotary_scale);
  });
}

int foretoken_stack_free(Stack* stack) {
  delete stack;
  return kDone;
}

int foretoken_stack_measure_fetches(const Stack& stack, Fetches* fastest,
                                      double seconds[2][kFetches], int64_t* bytes) {
  return guarded([&] {
    *fastest = measure_fetches(stack.weights(), seconds);
    *bytes = 0;
    for (const Packed* w : stack.weights()) *bytes += w->bytes();
  });
}

int foretoken_stack_set_fetches(Stack& stack, Fetch one, Fetch few) {
  stack.set_fetches({one, few});
  return kDone;
}

int foretoken_stack_run(Stack& stack, const Batch& batch, const Features* features,
                        float* const* keys, float* const* values, float* logits, float* hidden,
                        float* const* aux) {
  return guarded([&] { stack.run(batch, features, keys, values, logits, hidden, aux); });
}

int foretoken_stack_observe(Stack& stack, const Batch& batch, const Outcome& outcome,
                           const Features& features, float* const* keys, float* const* values) {
  return guarded([&] { stack.observe(batch.attention, outcome, features, keys, values); });
}

int foretoken_stack_logits(Stack& stack, const float* hidden, int64_t rows, float* logits) {
  return guarded([&] { stack.logits_of(hidden, rows, logits); });
}

int foretoken_stack_draft(Stack& stack, const Batch& first, float* const* keys,
                            float* const* values, const DraftRound& round) {
  return guarded([&] { stack.draft(first, keys, values, round); });
}
}
}  // namespace foretoken
