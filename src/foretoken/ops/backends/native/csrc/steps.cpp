// The bookkeeping of a step over its slots: `ops/steps.py` is the contract, results must equal those of
// `backends/torch/steps.py`. At batch 1 a function takes 0.1 us, too short to share with other threads.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>
#include "call.h"

namespace foretoken {
namespace {
using std::to_string;

// `ops.steps.SlotState`.
struct Table {
  int32_t* token_SL;
  const int64_t* block_SL;
  int64_t *length_S, *computed_S, *limit_S;
  int64_t slots, width, columns;

  int32_t* tokens(int64_t slot) const { return token_SL + slot * width; }
  bool may_grow(int64_t slot) const { return length_S[slot] < limit_S[slot]; }
  int64_t spare() const { return slots - 1; }
};

struct Counts {
  const int64_t *slot_B, *most_B;
  int64_t *num_B, *position_B;
  int64_t requests;
  const Table* table;
};

// `ops.steps.DraftRequests`, and its drafts: read by `write`, written by `look_up`.
struct Drafts {
  const int64_t *slot_B, *requested_B, *position_B;
  int64_t *num_B, *token_BK;
  int64_t requests, most, last_id;
  const Table* table;
};

// `ops.steps.StepTokens`.
struct StepTokens {
  const int64_t *slot_B, *num_tokens_B, *decider_B, *num_D;
  int64_t requests;

  int64_t decider(int64_t b) const { return decider_B ? decider_B[b] : b; }  // -1: b does not decide
};

// Memory for the tensors of a batch. Sizes are always written, tensors only if the capacity suffices.
struct Packed {
  int64_t *memory, capacity, tokens, rows, requests, columns;

  int64_t needs() const { return 2 * (tokens + requests) + rows + 1 + requests * columns; }
};

struct Step {
  StepTokens tokens;
  int64_t block_size, ahead;  // for `pack`
  // For `advance`: the `ops.Verdict` on `deciding` requests with up to `most` drafts, and the outcome.
  const int64_t *token_DK1, *accepted_D;
  const bool* finite_D;
  int64_t* outcome;
  int64_t deciding, most;
  const Table* table;
  Packed* out;
};

// `ops.steps.DraftRequests`, and the tensors of `ops.steps.Round`.
struct Round {
  const int64_t *slot_B, *requested_B, *position_B;
  int64_t *num_B, *index_B1, *place_3KB;  // place: position_KB, length_KB, index_KB
  int64_t requests, most, known, max_len, block_size;
  const Table* table;
  Packed* out;
};

// Tokens start, ..., start + count - 1 of a slot, of which the last `rows` need logits. After the first
// `owned` blocks of the slot the block table names the block of the spare slot.
struct Span {
  int64_t slot, start, count, rows, owned;

  int64_t length() const { return start + count; }
};

int64_t blocks_of(int64_t tokens, int64_t block_size) {
  return (tokens + block_size - 1) / block_size;
}

void write(const Table& table, const std::vector<Span>& spans, const Packed& out) {
  int64_t *token = out.memory, *position = token + out.tokens, *row = position + out.tokens;
  int64_t *start = row + out.rows, *length = start + out.requests + 1, *block = length + out.requests;
  int64_t end = 0;
  *start++ = 0;
  for (const Span& span : spans) {
    const int32_t* slot_tokens = table.tokens(span.slot);
    for (int64_t i = span.start; i < span.length(); i++) {
      if (slot_tokens[i] < 0)
        throw Misfit("token " + to_string(i) + " of slot " + to_string(span.slot) +
                     " is to be computed and was never written");
      *token++ = slot_tokens[i];
      *position++ = i;
    }
    end += span.count;
    for (int64_t i = end - span.rows; i < end; i++) *row++ = i;
    *start++ = end;
    *length++ = span.length();
    const int64_t *slot_blocks = table.block_SL + span.slot * table.columns,
                  owned = std::min(span.owned, out.columns);
    block = std::copy(slot_blocks, slot_blocks + owned, block);
    block = std::fill_n(block, out.columns - owned, table.block_SL[table.spare() * table.columns]);
  }
}

void pack(const Table& table, const std::vector<Span>& spans, int64_t block_size, int64_t ahead,
          Packed& out) {
  const int64_t room = std::min(table.width, table.columns * block_size);
  int64_t longest = 0;
  out.tokens = out.rows = 0;
  for (const Span& span : spans) {
    if (span.length() > room)
      throw Misfit(to_string(span.length()) + " tokens of slot " + to_string(span.slot) +
                   ", which has room for " + to_string(room));
    longest = std::max(longest, span.length());
    out.tokens += span.count;
    out.rows += span.rows;
  }
  out.requests = spans.size();
  out.columns = std::min(table.columns, blocks_of(longest + ahead, block_size));
  if (out.needs() <= out.capacity) write(table, spans, out);
}

std::vector<Span> spans_of(const Table& table, const StepTokens& tokens) {
  std::vector<Span> spans(tokens.requests);
  for (int64_t b = 0; b < tokens.requests; b++) {
    const int64_t d = tokens.decider(b), rows = d < 0 ? 0 : tokens.num_D[d] + 1;
    // The last token of a finished request need not be computed, and may have no block.
    const int64_t given = tokens.slot_B[b], slot = table.may_grow(given) ? given : table.spare();
    const int64_t count = tokens.num_tokens_B[b] + std::max<int64_t>(rows - 1, 0);
    spans[b] = {slot, table.computed_S[slot], count, rows, table.columns};
  }
  return spans;
}

// Also writes the tensors of the round.
std::vector<Span> spans_of(const Table& table, const Round& round) {
  std::vector<Span> spans(round.requests);
  const int64_t last = std::min(round.max_len, table.columns * round.block_size);
  const int64_t size = round.most * round.requests;
  for (int64_t b = 0; b < round.requests; b++) {
    const int64_t position = round.position_B[b], given = round.slot_B[b];
    const bool fits = position <= round.max_len && given < table.spare() && table.may_grow(given);
    const int64_t slot = fits ? given : table.spare(), length = fits ? position : 1;
    const int64_t left = std::max<int64_t>(round.max_len + 1 - position, 0);
    const int64_t num = std::min(round.requested_B[b], left), count = std::min(length, round.known);
    spans[b] = {slot, length - count, count, 1, blocks_of(length + num, round.block_size)};
    round.num_B[b] = num;
    round.index_B1[b] = b;
    for (int64_t i = 0; i < round.most; i++) {
      int64_t* place = round.place_3KB + i * round.requests + b;
      const int64_t end = std::min(length + i, last);
      place[0] = end - 1;
      place[size] = end;
      place[2 * size] = i;
    }
  }
  round.index_B1[round.requests] = round.requests;
  return spans;
}

void check(const Table& table, const Step& step) {
  const StepTokens& tokens = step.tokens;
  for (int64_t b = 0; b < tokens.requests; b++) {
    const int64_t slot = tokens.slot_B[b], d = tokens.decider(b);
    if (d < 0 || !table.may_grow(slot)) continue;
    const int64_t accepted = step.accepted_D[d];
    const int64_t end = table.length_S[slot] + accepted + step.finite_D[d];
    if (accepted < 0 || accepted > step.most || end > table.width)
      throw Misfit("slot " + to_string(slot) + ", which has room for " + to_string(table.width) +
                   " tokens, has " + to_string(table.length_S[slot]) + " and accepted " +
                   to_string(accepted) + " of " + to_string(step.most) + " drafts");
  }
}

void advance(const Table& table, const Step& step) {
  const StepTokens& tokens = step.tokens;
  int64_t* to = step.outcome;
  for (int64_t b = 0; b < tokens.requests; b++) {
    const int64_t slot = tokens.slot_B[b], d = tokens.decider(b);
    *to++ = table.computed_S[slot];
    if (!table.may_grow(slot)) continue;
    table.computed_S[slot] += tokens.num_tokens_B[b];
    if (d < 0) continue;
    const int64_t accepted = step.accepted_D[d], finite = step.finite_D[d];
    const int64_t* token = step.token_DK1 + d * (step.most + 1);
    int64_t& length = table.length_S[slot];
    std::copy(token, token + accepted + finite, table.tokens(slot) + length);
    table.computed_S[slot] += accepted;
    length += accepted + finite;
    if (!finite) table.limit_S[slot] = length;
  }
  for (int64_t d = 0; d < step.deciding; d++) {
    const int64_t* token = step.token_DK1 + d * (step.most + 1);
    *to++ = tokens.num_D[d];
    *to++ = step.accepted_D[d];
    *to++ = step.finite_D[d];
    to = std::copy(token, token + step.most + 1, to);
  }
}

// The end of an earlier occurrence of the last tokens, or -1: of the longest occurrences the latest that
// `num` tokens follow, else the earliest.
int64_t find_end(const int32_t* text, int64_t length, int64_t num, int64_t shortest, int64_t longest) {
  const int64_t last = length - 1;
  int64_t best = -1, size = 0;
  bool has_all = false;
  for (int64_t end = last - 1; end >= 0 && !(has_all && size == longest); end--) {
    if (text[end] != text[last]) continue;
    int64_t same = 1;
    while (same < longest && same <= end && text[end - same] == text[last - same]) same++;
    if (same < shortest || same < size || (same == size && has_all)) continue;
    best = end;
    size = same;
    has_all = last - end >= num;
  }
  return best;
}
}  // namespace
}  // namespace foretoken

using namespace foretoken;

extern "C" {
const char* foretoken_misfit() { return misfit; }

int foretoken_steps_count(const Counts* counts) {
  for (int64_t b = 0; b < counts->requests; b++) {
    const Table& table = *counts->table;
    const int64_t slot = counts->slot_B[b], length = table.length_S[slot];
    const int64_t num = std::min(counts->most_B[b], table.limit_S[slot] - length - 1);
    counts->num_B[b] = std::max<int64_t>(num, 0);
    counts->position_B[b] = length;
  }
  return kDone;
}

int foretoken_steps_write(const Drafts* drafts) {
  const Table& table = *drafts->table;
  return guarded([&] {
    for (int64_t b = 0; b < drafts->requests; b++) {
      const int64_t num = drafts->num_B[b], position = drafts->position_B[b];
      if (num > std::min(drafts->requested_B[b], drafts->most) || position + num > table.width)
        throw Misfit("slot " + to_string(drafts->slot_B[b]) + ": " + to_string(num) +
                     " drafts at position " + to_string(position) + ", but at most " +
                     to_string(drafts->requested_B[b]) + " requested, " + to_string(drafts->most) +
                     " given, and room for " + to_string(table.width) + " tokens");
    }
    for (int64_t b = 0; b < drafts->requests; b++) {
      const int64_t* token_K = drafts->token_BK + b * drafts->most;
      int32_t* slot_drafts = table.tokens(drafts->slot_B[b]) + drafts->position_B[b];
      for (int64_t i = 0; i < drafts->num_B[b]; i++)
        slot_drafts[i] = static_cast<int32_t>(std::clamp<int64_t>(token_K[i], 0, drafts->last_id));
    }
  });
}

int foretoken_steps_pack(const Step* step) {
  return guarded([&] {
    const Table& table = *step->table;
    pack(table, spans_of(table, step->tokens), step->block_size, step->ahead, *step->out);
  });
}

int foretoken_steps_advance(const Step* step) {
  return guarded([&] {
    check(*step->table, *step);
    advance(*step->table, *step);
  });
}

int foretoken_steps_begin_round(const Round* round) {
  return guarded([&] {
    const Table& table = *round->table;
    pack(table, spans_of(table, *round), round->block_size, round->most, *round->out);
  });
}

int foretoken_steps_look_up(const Drafts* drafts, int64_t shortest, int64_t longest) {
  const Table& table = *drafts->table;
  for (int64_t b = 0; b < drafts->requests; b++) {
    const int32_t* text = table.tokens(drafts->slot_B[b]);
    const int64_t length = drafts->position_B[b], most = drafts->requested_B[b];
    const int64_t end = most > 0 ? find_end(text, length, most, shortest, longest) : -1;
    const int64_t num = end < 0 ? 0 : std::min(most, length - 1 - end);
    int64_t* token_K = drafts->token_BK + b * drafts->most;
    std::copy(text + end + 1, text + end + 1 + num, token_K);
    std::fill(token_K + num, token_K + drafts->most, -1);
    drafts->num_B[b] = num;
  }
  return kDone;
}
}
