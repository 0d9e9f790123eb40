#include "sampling.h"

#include <algorithm>
#include <cstring>

#include "pool.h"
#include "simd.h"

namespace foretoken {
namespace {

// Number of logits above `least`, and not dropped.
int64_t count_above(const Distribution& d, float least) {
  if (d.listed)
    return std::count_if(d.kept.begin(), d.kept.end(),
                         [&](const Token& token) { return token.logit > least; });
  int64_t count = 0;
  alignas(64) float buffer[kBlock];
  for (int64_t j = 0; j < d.row.blocks(); j++) {
    if (!(d.peak_J[j] > least)) continue;
    const float* x = d.row.block(j, buffer);
    IntVec found = {};
    for (int64_t i = 0; i < d.row.padded(j); i += kWidth)
      found -= (load(x + i) > splat(least)) & (load(x + i) >= splat(d.threshold));
    for (int i = 0; i < kWidth; i++) count += found[i];
  }
  return count;
}

// The likeliest tokens, then dropped ones, the lowest id first where logits are equal.
void write_top(Distribution& d, const TopLogprobs& out, int64_t n) {
  if (!d.listed) {
    measure_peaks(d);
    gather(d, std::max(d.threshold, rank_bound(d, out.top)));
  }
  const auto likelier = [](const Token& a, const Token& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
  };
  const int64_t found = std::min(out.top, static_cast<int64_t>(d.kept.size()));
  std::partial_sort(d.kept.begin(), d.kept.begin() + found, d.kept.end(), likelier);
  float* logprob = out.top_logprob_NT + n * out.top;
  int64_t* token = out.top_token_NT + n * out.top;
  for (int64_t t = 0; t < found; t++) {
    token[t] = d.kept[t].id;
    logprob[t] = static_cast<float>(d.log_of(token[t]));
  }
  for (int64_t t = found, id = 0; t < out.top; t++, id++) {  // all that is kept is there
    while (std::find(token, token + found, id) != token + found) id++;
    token[t] = id;
    logprob[t] = kMinusInfinity;
  }
}

void write_logprobs(Distribution& d, int64_t token, const TopLogprobs& out, int64_t n) {
  if (!d.finite()) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    out.logprob_N[n] = nan;
    out.rank_N[n] = 1;
    std::fill_n(out.top_logprob_NT + n * out.top, out.top, nan);
    for (int64_t t = 0; t < out.top; t++) out.top_token_NT[n * out.top + t] = t;
    return;
  }
  const double logprob = token < 0 ? kNothing : d.log_of(token);
  out.logprob_N[n] = static_cast<float>(logprob);
  out.rank_N[n] = 1 + count_above(d, logprob > kNothing ? d.row.value(token) : kMinusInfinity);
  if (out.top) write_top(d, out, n);
}

}  // namespace

Distribution& scratch() {
  thread_local Distribution d;
  return d;
}

Noise Place::noise(const Params& params, int token_stream, int block_stream) const {
  const int64_t key = params.key_S[slot];
  return {at(key, position, draft_index, token_stream), at(key, position, draft_index, block_stream),
          params.filters(slot).by_rank(vocabulary) || params.coupled(slot), fp64};
}

void process(const Params& params, const Rows& rows, float* out_NV) {
  const int64_t size = rows.logits.vocabulary;
  parallel_for(rows.count, worth_waking(rows.count, size), [&](int64_t n) {
    const Filters filters = params.filters(rows.slot_N[n]);
    const Row row = row_of(rows.logits, rows.edits, n);
    float threshold = kMinusInfinity, temperature = filters.temperature;
    if (temperature > 0) {
      measure(row, filters, scratch());
      if (scratch().finite()) threshold = scratch().threshold;
    } else {
      temperature = 1;
    }
    alignas(64) float buffer[kBlock];
    for (int64_t j = 0; j < row.blocks(); j++) {
      const float* x = row.block(j, buffer);
      for (int64_t i = 0; i < row.padded(j); i += kWidth) {
        const Vec v = load(x + i);
        store(buffer + i, v < splat(threshold) ? splat(kMinusInfinity) : v / temperature);
      }
      std::memcpy(out_NV + n * size + j * kBlock, buffer,
                  std::min(kBlock, size - j * kBlock) * sizeof(float));
    }
  });
}

void sample(const Params& params, const Rows& rows, const Places& p, int64_t* token_N) {
  const int64_t size = rows.logits.vocabulary;
  parallel_for(rows.count, worth_waking(rows.count, size), [&](int64_t n) {
    const int64_t slot = rows.slot_N[n];
    const Row row = row_of(rows.logits, rows.edits, n);
    if (params.temperature_S[slot] == 0) {
      token_N[n] = largest(row).id;
      return;
    }
    const Place place{slot, p.position_N[n], p.draft_index_N[n], size, p.fp64_noise != 0};
    const Noise noise = place.noise(params, static_cast<int>(p.token_stream),
                                    static_cast<int>(p.block_stream));
    token_N[n] = foretoken::draw(row, params.filters(slot), noise, scratch());
  });
}

int64_t draft_row(const Params& params, const Row& row, const Place& place, const Cache* cache) {
  Distribution& d = scratch();
  const bool greedy = params.temperature_S[place.slot] == 0;
  if (!greedy) measure(row, params.filters(place.slot), d);
  if (cache) {
    const int64_t at = place.slot * cache->drafts + place.draft_index;
    std::memcpy(cache->row(place.slot, place.draft_index), row.data,
                row.size * bytes_of(row.dtype));
    cache->threshold_SK[at] = greedy ? kMinusInfinity : d.threshold;
    cache->lse_SK[at] = greedy ? 0 : d.lse;
  }
  if (greedy) return largest(row).id;
  if (!d.finite()) return 0;
  if (!params.coupled(place.slot))
    return foretoken::draw(d, place.noise(params, kDraftToken, kDraftBlock));
  Place shared = place;  // the target's own noise
  shared.draft_index = 0;
  return foretoken::draw(d, shared.noise(params, kTargetToken, kTargetBlock));
}

void draft(const Params& params, const Rows& rows, const Places& p, const Cache* cache,
           int64_t* token_B) {
  const int64_t size = rows.logits.vocabulary;
  parallel_for(rows.count, worth_waking(rows.count, size), [&](int64_t n) {
    const Place place{rows.slot_N[n], p.position_N[n], p.draft_index_N[n], size, p.fp64_noise != 0};
    token_B[n] = draft_row(params, row_of(rows.logits, nullptr, n), place, cache);
  });
}

void logprobs(const Params* params, const Rows& rows, const int64_t* token_N,
              const TopLogprobs& out) {
  parallel_for(rows.count, worth_waking(rows.count, rows.logits.vocabulary), [&](int64_t n) {
    Filters filters{1, 0, 1, 0};
    if (params && params->temperature_S[rows.slot_N[n]] > 0)
      filters = params->filters(rows.slot_N[n]);
    measure(row_of(rows.logits, rows.edits, n), filters, scratch());
    write_logprobs(scratch(), token_N[n], out, n);
  });
}

}  // namespace foretoken
