// The functions that Python calls, by ctypes. Arguments have been checked there.
//
// Each returns 0 if done, 1 if it does not cover what is asked (`foretoken_verify` alone), 2 if memory
// ran out, 3 if anything else was thrown.
#include <new>

#include "decoder.h"
#include "verify.h"

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

int foretoken_decoder_tune(Decoder* decoder, Tuning* tuning) {
  return guarded([&] { *tuning = decoder->tune(); });
}

int foretoken_decoder_set_fetches(Decoder* decoder, int64_t one, int64_t few) {
  decoder->set_fetches({Fetch{one}, Fetch{few}});
  return 0;
}

int foretoken_decoder_forward(Decoder* decoder, const Batch* batch, float* const* keys,
                              float* const* values, float* logits, float* const* aux) {
  return guarded([&] { decoder->forward(*batch, keys, values, logits, aux); });
}

int foretoken_decoder_draft(Decoder* decoder, const Batch* first, float* const* keys,
                            float* const* values, const Params* params, const DraftRound* round) {
  return guarded([&] { decoder->draft(*first, keys, values, *params, *round); });
}

int foretoken_process(const Params* params, const Rows* rows, float* out_NV) {
  return guarded([&] { process(*params, *rows, out_NV); });
}

int foretoken_sample(const Params* params, const Rows* rows, const Places* places,
                     int64_t* token_N) {
  return guarded([&] { sample(*params, *rows, *places, token_N); });
}

int foretoken_draft(const Params* params, const Rows* rows, const Places* places,
                    const Cache* cache, int64_t* token_B) {
  return guarded([&] { draft(*params, *rows, *places, cache, token_B); });
}

int foretoken_logprobs(const Params* params, const Rows* rows, const int64_t* token_N,
                       const TopLogprobs* out) {
  return guarded([&] { logprobs(params, *rows, token_N, *out); });
}

int foretoken_verify(const Params* params, const VerifyBatch* batch, const Outcome* out) {
  bool covered = true;
  const int status = guarded([&] { covered = verify(*params, *batch, *out); });
  return covered ? status : 1;
}
}
