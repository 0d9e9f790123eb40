#include "sampling.h"

#include <algorithm>
#include <cstring>

#include "call.h"
#include "pool.h"
#include "simd.h"

namespace foretoken {

// `ops.Rows`. Without parameters and slots: raw logits, for `foretoken_logprobs` only.
struct Rows {
  const int64_t* slot_N;
  Logits logits;
  const Params* params;
  const Edits* edits;
  int64_t count;

  Row row(int64_t n) const { return row_of(logits, edits, n); }
  Filters filters(int64_t n) const { return params->filters(slot_N[n]); }
};

// `ops.Noise`.
struct Places {
  const int64_t *position_N, *draft_index_N;
  int64_t token_stream, block_stream, fp64;

  Place at(int64_t n, const Rows& rows) const {
    return {rows.slot_N[n], position_N[n], draft_index_N[n], rows.logits.vocabulary, fp64};
  }
};

namespace {

// Memory for `ops.Logprobs`.
struct TopLogprobs {
  float* logprob_N;
  int64_t* rank_N;
  float* top_logprob_NT;
  int64_t* top_token_NT;
  int64_t top;
};

// Number of kept logits above `least`.
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

// The likeliest tokens, then dropped ones; among equal logits the lowest id first.
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
  for (int64_t t = found, id = 0; t < out.top; t++, id++) {  // fill up with dropped tokens
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

// work(n) for every row.
template <typename Work>
int for_rows(const Rows& rows, const Work& work) {
  const bool worth = worth_waking(rows.count, rows.logits.vocabulary);
  return guarded([&] { parallel_for(rows.count, worth, work); });
}

}  // namespace

Distribution& scratch() {
  thread_local Distribution d;
  return d;
}

Noise Place::noise(const Params& params, int64_t token_stream, int64_t block_stream) const {
  const int64_t key = params.key_S[slot];
  return {at(key, position, draft_index, token_stream), at(key, position, draft_index, block_stream),
          params.filters(slot).by_rank(vocabulary) || params.coupled(slot), fp64 != 0};
}

int64_t draft_row(const Params& params, const Row& row, const Place& place, const Cache* cache) {
  Distribution& d = scratch();
  const bool greedy = params.greedy(place.slot);
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
  if (!params.coupled(place.slot)) return draw(d, place.noise(params, kDraftToken, kDraftBlock));
  Place shared = place;  // under COUPLED, the target's own noise
  shared.draft_index = 0;
  return draw(d, shared.noise(params, kTargetToken, kTargetBlock));
}

extern "C" {

int foretoken_process(const Rows& rows, float* out_NV) {
  return for_rows(rows, [&](int64_t n) {
    const Filters filters = rows.filters(n);
    const Row row = rows.row(n);
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
      std::memcpy(out_NV + n * row.size + j * kBlock, buffer,
                  std::min(kBlock, row.size - j * kBlock) * sizeof(float));
    }
  });
}

int foretoken_sample(const Rows& rows, const Places& places, int64_t* token_N) {
  return for_rows(rows, [&](int64_t n) {
    if (rows.params->greedy(rows.slot_N[n])) {
      token_N[n] = largest(rows.row(n)).id;
      return;
    }
    const Noise noise =
        places.at(n, rows).noise(*rows.params, places.token_stream, places.block_stream);
    token_N[n] = draw(rows.row(n), rows.filters(n), noise, scratch());
  });
}

// Ignores the streams of `places`.
int foretoken_draft(const Rows& rows, const Places& places, const Cache* cache, int64_t* token_N) {
  return for_rows(rows, [&](int64_t n) {
    token_N[n] = draft_row(*rows.params, rows.row(n), places.at(n, rows), cache);
  });
}

int foretoken_logprobs(const Rows& rows, const int64_t* token_N, float* logprob_N, int64_t* rank_N,
                       float* top_logprob_NT, int64_t* top_token_NT, int64_t top) {
  const TopLogprobs out{logprob_N, rank_N, top_logprob_NT, top_token_NT, top};
  return for_rows(rows, [&](int64_t n) {
    const bool raw = !rows.params || rows.params->greedy(rows.slot_N[n]);
    measure(rows.row(n), raw ? Filters{1, 0, 1, 0} : rows.filters(n), scratch());
    write_logprobs(scratch(), token_N[n], out, n);
  });
}
}

}  // namespace foretoken
