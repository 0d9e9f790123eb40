// The functions that Python calls, by ctypes. Arguments have been checked there.
//
// Each returns 0 if done, 1 if it does not cover what is asked and did nothing, 2 if memory ran out,
// 3 if anything else was thrown.
#include <new>

#include "decoder.h"
#include "sampling.h"

using namespace foretoken;

namespace {

// An exception must not cross into Python's frames.
template <typename Work>
int guarded(const Work& work) {
  try {
    work();
    return 0;
  } catch (const std::bad_alloc&) {
    return 2;
  } catch (...) {
    return 3;
  }
}

}  // namespace

extern "C" {

int foretoken_set_num_threads(int count) {
  return guarded([&] { set_num_threads(count); });
}

int foretoken_decoder_new(const DecoderShape* shape, const LayerWeights* layers,
                          const float* embedding, const float* final_norm, const float* head,
                          const float* frequencies, Decoder** made) {
  return guarded(
      [&] { *made = new Decoder(*shape, layers, embedding, final_norm, head, frequencies); });
}

int foretoken_decoder_free(Decoder* decoder) {
  delete decoder;
  return 0;
}

int foretoken_decoder_forward(Decoder* decoder, const Batch* batch, float* const* keys,
                              float* const* values, float* logits) {
  return guarded([&] { decoder->forward(*batch, keys, values, logits); });
}

// Does not cover draws from filtered logits; the largest logit survives every filter.
int foretoken_decoder_draft(Decoder* decoder, const Batch* first, float* const* keys,
                            float* const* values, const Params* params, const DraftRound* round) {
  const bool draws = round->q_logits;
  if (draws && any_filter(*params, round->slot_B, round->requests, decoder->vocabulary())) return 1;
  return guarded([&] { decoder->draft(*first, keys, values, *params, *round); });
}

// Divides by the temperature; does not cover rows that are to be filtered.
int foretoken_scale(const Params* params, const float* logits_NV, const int64_t* slot_N,
                    int64_t rows, int64_t vocabulary, float* out_NV) {
  if (any_filter(*params, slot_N, rows, vocabulary)) return 1;
  return guarded([&] { scale(*params, logits_NV, slot_N, rows, vocabulary, out_NV); });
}

int foretoken_sample(const Params* params, const SampleRows* rows, int64_t* token_N) {
  return guarded([&] { sample(*params, *rows, token_N); });
}

int foretoken_reduce(const Params* params, const VerifyBatch* batch, const Reduced* out) {
  return guarded([&] { reduce(*params, *batch, *out); });
}

int foretoken_emit(const Params* params, const VerifyBatch* batch, const Reduced* reduced,
                   const int64_t* n_accept_B, const double* log_w_B, int64_t* token_BK1,
                   uint8_t* finite_B) {
  return guarded(
      [&] { emit(*params, *batch, *reduced, n_accept_B, log_w_B, token_BK1, finite_B); });
}
}
