#include "sampling.h"
#include <algorithm>
#include "call.h"
#include "pool.h"

namespace foretoken {
// `ops.Rows`; for `foretoken_logprobs` raw logits, if parameters and slots are null.
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
struct NoiseNames {
  const int64_t *position_N, *draft_index_N;
  int64_t token_stream, block_stream, fp64;

  NoiseName of(int64_t n, const Rows& rows) const {
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

// Number of kept logits above `limit`.
int64_t count_above(const Distribution& d, float limit) {
  if (d.listed)
    return std::count_if(d.kept.begin(), d.kept.end(),
                         [&](const Token& token) { return token.logit > limit; });
  int64_t count = 0;
  alignas(64) float buffer[kBlock];
  for (int64_t j = 0; j < d.row.blocks(); j++) {
    if (!(d.peak_J[j] > limit)) continue;
    const float* x = d.row.block(j, buffer);
    IntVec counts = {};
    for (int64_t i = 0; i < d.row.padded(j); i += kWidth)
      counts -= (load(x + i) > splat(limit)) & (load(x + i) >= splat(d.threshold));
    for (int i = 0; i < kWidth; i++) count += counts[i];
  }
  return count;
}

// Write the likeliest tokens, the lowest id first on ties; then dropped tokens, if too few are kept.
void write_top(Distribution& d, const TopLogprobs& out, int64_t n) {
  if (!d.listed) {
    measure_peaks(d);
    list_tokens(d, std::max(d.threshold, kth_bound(d, out.top)));
  }
  const auto likelier = [](const Token& a, const Token& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
  };
  const int64_t num_kept = std::min(out.top, static_cast<int64_t>(d.kept.size()));
  std::partial_sort(d.kept.begin(), d.kept.begin() + num_kept, d.kept.end(), likelier);
  float* logprob = out.top_logprob_NT + n * out.top;
  int64_t* token = out.top_token_NT + n * out.top;
  for (int64_t t = 0; t < num_kept; t++) {
    token[t] = d.kept[t].id;
    logprob[t] = static_cast<float>(d.log_of(token[t]));
  }
  for (int64_t t = num_kept, id = 0; t < out.top; t++, id++) {
    while (std::find(token, token + num_kept, id) != token + num_kept) id++;
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
  const double logprob = token < 0 ? kLogZero : d.log_of(token);
  out.logprob_N[n] = static_cast<float>(logprob);
  out.rank_N[n] = 1 + count_above(d, logprob > kLogZero ? d.row.value(token) : kMinusInfinity);
  if (out.top) write_top(d, out, n);
}

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

Noise NoiseName::noise(const Params& params, int64_t token_stream, int64_t block_stream) const {
  const int64_t key = params.key_S[slot];
  return {stream_name(key, position, draft_index, token_stream),
          stream_name(key, position, draft_index, block_stream),
          params.filters(slot).by_rank(vocabulary) || params.coupled(slot), fp64 != 0};
}

int64_t draft_row(const Params& params, const Row& row, const NoiseName& name, const Cache* cache) {
  Distribution& d = scratch();
  const bool greedy = params.greedy(name.slot);
  if (!greedy) measure(row, params.filters(name.slot), d);
  if (cache) {
    const int64_t entry = name.slot * cache->drafts + name.draft_index;
    std::memcpy(cache->row(name.slot, name.draft_index), row.data, row.size * bytes_of(row.dtype));
    cache->threshold_SK[entry] = greedy ? kMinusInfinity : d.threshold;
    cache->lse_SK[entry] = greedy ? 0 : d.lse;
  }
  if (greedy) return largest(row).id;
  if (!d.finite()) return 0;
  if (!params.coupled(name.slot)) return draw(d, name.noise(params, kDraftToken, kDraftBlock));
  NoiseName of_target = name;  // under COUPLED a draft is drawn with the target's noise
  of_target.draft_index = 0;
  return draw(d, of_target.noise(params, kTargetToken, kTargetBlock));
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

int foretoken_sample(const Rows& rows, const NoiseNames& names, int64_t* token_N) {
  return for_rows(rows, [&](int64_t n) {
    if (rows.params->greedy(rows.slot_N[n])) {
      token_N[n] = largest(rows.row(n)).id;
      return;
    }
    const Noise noise = names.of(n, rows).noise(*rows.params, names.token_stream, names.block_stream);
    token_N[n] = draw(rows.row(n), rows.filters(n), noise, scratch());
  });
}

// Does not read the streams of `names`.
int foretoken_draft(const Rows& rows, const NoiseNames& names, const Cache* cache, int64_t* token_N) {
  return for_rows(rows, [&](int64_t n) {
    token_N[n] = draft_row(*rows.params, rows.row(n), names.of(n, rows), cache);
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
