// Passes of a decoder, packed tokens in, logits out, and of an EAGLE-3 head; a round of drafting; how
// weights are fetched the fastest here.
#include "decoder.h"

#include <algorithm>

#include "call.h"

namespace foretoken {

void Decoder::forward(const Batch& batch, float* const* keys, float* const* values, float* logits,
                      float* const* aux) {
  const int64_t h = model_.hidden;
  place(batch.num_tokens, batch.num_rows);
  for (int64_t t = 0; t < batch.num_tokens; t++)
    std::memcpy(x_ + t * h, model_.embedding + batch.token_T[t] * h, h * sizeof(float));
  run_layers(batch, keys, values, aux);
  project(batch.num_rows, logits);
}

void Decoder::forward_head(const Batch& batch, const Features& features, float* const* keys,
                           float* const* values, float* hidden) {
  const int64_t h = model_.hidden;
  place(batch.num_tokens, batch.num_rows);
  if (features.feature)
    std::memcpy(x_, features.feature, batch.num_tokens * h * sizeof(float));
  else
    join_states(features, batch.num_tokens);
  run_layers(batch, keys, values);
  std::memcpy(hidden, x_, batch.num_rows * h * sizeof(float));
}

void Decoder::observe(const AttentionBatch& pass, const Outcome& outcome, const Features& features,
                      float* const* keys, float* const* values) {
  const int64_t h = model_.hidden;
  std::vector<int64_t> tokens, rows, starts, lengths, wanted;
  for (int64_t b = 0; b < pass.requests; b++) {
    const int64_t slot = outcome.slot_B[b], end = pass.query_start_B1[b + 1];
    const int64_t first = pass.length_B[b] - pass.queries(b);
    const int64_t last = std::min(pass.length_B[b] - 1, outcome.length_B[b] - 2);
    starts.push_back(static_cast<int64_t>(tokens.size()));
    for (int64_t i = first; i <= std::max(first, last); i++) {  // without any, some row
      const int64_t next = std::min(i + 1, outcome.width - 1);
      tokens.push_back(std::max(outcome.token_SL[slot * outcome.width + next], 0));
      rows.push_back(end - pass.length_B[b] + i);
    }
    wanted.push_back(static_cast<int64_t>(tokens.size()) - 1);
    lengths.push_back(std::max(first, last) + 1);
  }
  const auto count = static_cast<int64_t>(tokens.size());
  starts.push_back(count);
  const Batch batch{tokens.data(), wanted.data(),
                    {starts.data(), lengths.data(), pass.block_BL, pass.requests, pass.columns,
                     pass.block_size},
                    count, pass.requests};
  place(count, pass.requests);
  join_states({nullptr, features.states, rows.data(), features.count}, count);
  run_layers(batch, keys, values);
  for (int64_t b = 0; b < pass.requests; b++)
    std::memcpy(outcome.hidden_SC + outcome.slot_B[b] * h, x_ + b * h, h * sizeof(float));
}

void Decoder::logits_of(const float* hidden, int64_t rows, float* logits) {
  place(rows, rows);
  std::memcpy(x_, hidden, rows * model_.hidden * sizeof(float));
  project(rows, logits);
}

void Decoder::draft(const Batch& first, float* const* keys, float* const* values,
                    const DraftRound& r) {
  const AttentionBatch& known = first.attention;
  const int64_t h = model_.hidden;
  draft_logits_.resize(known.requests * columns());
  std::fill_n(r.token_BK, known.requests * r.most, -1);
  std::vector<float> hidden(is_head_ ? known.requests * h : 0);  // what the last row of each gave
  std::vector<int64_t> live, tokens, starts, lengths, blocks;
  for (int64_t i = 0; i < r.most; i++) {
    for (auto* list : {&live, &tokens, &starts, &lengths, &blocks}) list->clear();
    for (int64_t b = 0; b < known.requests; b++) {
      if (r.num_drafts_B[b] <= i) continue;
      starts.push_back(static_cast<int64_t>(live.size()));
      live.push_back(b);
      // Logits that are no numbers have no largest (-1), and no row of the embedding.
      tokens.push_back(i ? std::max<int64_t>(r.token_BK[b * r.most + i - 1], 0) : 0);
      lengths.push_back(known.length_B[b] + i - is_head_);  // a head's row reads the token behind it
      const int64_t* row = known.blocks(is_head_ ? r.slot_B[b] : b);
      blocks.insert(blocks.end(), row, row + known.columns);
    }
    const auto count = static_cast<int64_t>(live.size());
    starts.push_back(count);
    const Batch next{tokens.data(), starts.data(),  // every token is wanted
                     {starts.data(), lengths.data(), blocks.data(), count, known.columns,
                      known.block_size},
                     count, count};
    if (is_head_) {
      place(count, count);
      for (int64_t n = 0; n < count; n++)
        std::memcpy(x_ + n * h, i ? &hidden[live[n] * h] : r.hidden_SC + r.slot_B[live[n]] * h,
                    h * sizeof(float));
      if (i) run_layers(next, keys, values);
      for (int64_t n = 0; n < count; n++)
        std::memcpy(&hidden[live[n] * h], x_ + n * h, h * sizeof(float));
      project(count, draft_logits_.data());
    } else {
      forward(i ? next : first, keys, values, draft_logits_.data());
    }
    for (int64_t n = 0; n < count; n++) {
      const int64_t b = live[n];
      const Row logits{draft_logits_.data() + n * columns(), kFloat32, columns()};
      const Place place{r.slot_B[b], known.length_B[b] + i, i, columns(), r.fp64};
      int64_t* token = r.token_BK + b * r.most + i;
      *token = r.cache ? draft_row(*r.params, logits, place, r.cache) : largest(logits).id;
    }
  }
}

// Features of a head's rows, to x_.
void Decoder::join_states(const Features& features, int64_t tokens) {
  const int64_t h = model_.hidden, all = eagle_.states, size = all / features.count;
  parallel_for(tokens, tokens * all > 100000, [&](int64_t t) {
    float* joined = joined_ + t * all;
    const int64_t row = features.row_T ? features.row_T[t] : t;
    for (int64_t i = 0; i < features.count; i++)
      std::memcpy(joined + i * size, features.states[i] + row * size, size * sizeof(float));
    const int64_t part = all / eagle_.parts;
    for (int64_t at = 0; eagle_.fc_norm && at < all; at += part)
      norm_row(joined + at, eagle_.fc_norm + at, part, norm_epsilon_, joined + at);
  });
  product(joined_, tokens, fc_, fetches_, [&](auto row, auto first, auto count, auto y) {
    std::memcpy(x_ + row * h + first, y, count * sizeof(float));
  });
}

// What q, k and v of a head read, to normed_: each token's vector, and its feature.
void Decoder::join_tokens(const Layer& layer, const Batch& batch) {
  const int64_t h = model_.hidden;
  parallel_for(batch.num_tokens, batch.num_tokens * h > 50000, [&](int64_t t) {
    const float* token = model_.embedding + batch.token_T[t] * h;
    float *both = normed_ + 2 * t * h, *feature = x_ + t * h;
    norm_row(token, layer.given.input_norm, h, norm_epsilon_, both);
    norm_row(feature, eagle_.hidden_norm, h, norm_epsilon_, both + h);
    if (eagle_.norm_before_residual) std::memcpy(feature, both + h, h * sizeof(float));
  });
}

// Logits of the first rows of x_; those that a head never drafts are -inf.
void Decoder::project(int64_t rows, float* logits) {
  const int64_t *ids = eagle_.target_ids, size = columns();
  const float* input = x_;
  if (!eagle_.norm_output) {
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

int foretoken_decoder_new(const Model& model, const Eagle* eagle, const LayerWeights* const* layers,
                          float norm_epsilon, float attention_scale, float rotary_scale,
                          Decoder** made) {
  return guarded([&] {
    *made = new Decoder(model, eagle, layers, norm_epsilon, attention_scale, rotary_scale);
  });
}

int foretoken_decoder_free(Decoder* decoder) {
  delete decoder;
  return kDone;
}

int foretoken_decoder_measure_fetches(const Decoder& decoder, Fetches* fastest,
                                      double seconds[2][kFetches], int64_t* bytes) {
  return guarded([&] {
    *fastest = measure_fetches(decoder.weights(), seconds);
    *bytes = 0;
    for (const Packed* w : decoder.weights()) *bytes += w->bytes();
  });
}

int foretoken_decoder_set_fetches(Decoder& decoder, Fetch one, Fetch few) {
  decoder.set_fetches({one, few});
  return kDone;
}

int foretoken_decoder_forward(Decoder& decoder, const Batch& batch, float* const* keys,
                              float* const* values, float* logits, float* const* aux) {
  return guarded([&] { decoder.forward(batch, keys, values, logits, aux); });
}

int foretoken_head_forward(Decoder& head, const Batch& batch, const Features& features,
                           float* const* keys, float* const* values, float* hidden) {
  return guarded([&] { head.forward_head(batch, features, keys, values, hidden); });
}

int foretoken_head_observe(Decoder& head, const Batch& batch, const Outcome& outcome,
                           const Features& features, float* const* keys, float* const* values) {
  return guarded([&] { head.observe(batch.attention, outcome, features, keys, values); });
}

int foretoken_head_logits(Decoder& head, const float* hidden, int64_t rows, float* logits) {
  return guarded([&] { head.logits_of(hidden, rows, logits); });
}

int foretoken_decoder_draft(Decoder& decoder, const Batch& first, float* const* keys,
                            float* const* values, const DraftRound& round) {
  return guarded([&] { decoder.draft(first, keys, values, round); });
}
}

}  // namespace foretoken
