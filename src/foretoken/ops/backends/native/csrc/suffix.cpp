// Drafts from the continuations of earlier occurrences of a text's last tokens (Oliaro et al. 2024,
// "SuffixDecoding"). Instead of a trie of all suffixes, each token has a link for each of a few lengths,
// as in LZ77: to the previous place where that many tokens, up to the place, have the same hash.
#include <algorithm>
#include <cstdint>
#include "call.h"

namespace foretoken {
namespace {
constexpr int kLinks = 3;  // ops/suffix.py: LINKS
constexpr int64_t kLengths[kLinks] = {1, 3, 8};  // tokens that are hashed for each link
constexpr int64_t kMostVotes = 32;  // occurrences read in a lookup, so that it takes microseconds
constexpr int64_t kMostDrafts = 64;

// A ring of tokens, of which the latest `size` are indexed. A negative token ends each text in it.
struct SuffixIndex {
  int32_t* token;             // [capacity]
  int32_t* latest;            // [kLinks, buckets]: the latest place with each hash
  int32_t* before;            // [kLinks, capacity]: the previous place with the hash of each place
  int64_t capacity, buckets;  // buckets: a power of 2
  int64_t end, size;          // end: the place of the next token

  int64_t age(int64_t at) const { return at < end ? end - at : end - at + capacity; }
  int64_t place(int64_t age) const { return age <= end ? end - age : end - age + capacity; }

  void append() {
    if (!size) std::fill(latest, latest + kLinks * buckets, -1);
    const int64_t at = end;
    end = end + 1 == capacity ? 0 : end + 1;
    size = std::min(size + 1, capacity);
    uint64_t hash = 0;
    int64_t count = 0;
    for (int link = 0; link < kLinks; link++) {
      for (; count < kLengths[link] && count < size && token[place(count + 1)] >= 0; count++)
        hash = mixed(hash, token[place(count + 1)]);
      int32_t& older = before[link * capacity + at];
      older = -1;
      if (count < kLengths[link]) continue;
      older = bucket(link, hash);
      bucket(link, hash) = static_cast<int32_t>(at);
    }
  }

  static uint64_t mixed(uint64_t hash, int32_t token) {
    return (hash + static_cast<uint32_t>(token) + 1) * 0x9E3779B97F4A7C15u;
  }
  int32_t& bucket(int link, uint64_t hash) const {
    return latest[link * buckets + ((hash >> 32) & (buckets - 1))];
  }
};

// The latest occurrences of the longest suffix that occurs: the ages of their last tokens.
struct Matches {
  int64_t length = 0, count = 0;
  int64_t age[kMostVotes];
};

struct Draft {
  int32_t token[kMostDrafts];
  int64_t count = 0;
  double expected = 0;  // number of accepted drafts, if tokens follow as often as they did before
};

struct Options {  // `ops/suffix.py: SuffixOptions`
  int64_t depth;
  double factor, least;
};

Matches find_matches(const SuffixIndex& index, const int32_t* text, int64_t length, int64_t depth) {
  uint64_t hashes[kLinks], hash = 0;
  for (int64_t link = 0, i = 0; link < kLinks; hashes[link++] = hash)
    for (; i < kLengths[link] && i < length; i++) hash = SuffixIndex::mixed(hash, text[length - 1 - i]);
  Matches matches;
  for (int link = kLinks - 1; link >= 0 && !matches.count; link--) {
    const int64_t least = kLengths[link];
    if (least > std::min(depth, length) || !index.size) continue;
    int64_t at = index.bucket(link, hashes[link]);
    for (int64_t i = 0, last = 0; i < kMostVotes && at >= 0; i++) {
      const int64_t age = index.age(at);
      if (age <= last || age > index.size) break;  // a newer token has overwritten this one
      const int64_t most = std::min({depth, length, index.size - age + 1});
      int64_t same = 0;
      while (same < most && index.token[index.place(age + same)] == text[length - 1 - same]) same++;
      if (same >= least && same >= matches.length) {
        if (same > matches.length) matches.count = 0;
        matches.length = same;
        matches.age[matches.count++] = age;
      }
      last = age;
      at = index.before[link * index.capacity + at];
    }
  }
  return matches;
}

// The commonest continuation of the matches, token by token, as long as its likelihood is at least
// `options.least`. `own`: the index holds this text, except its last token; the drafts continue it.
Draft draft_from(const SuffixIndex& index, Matches matches, bool own, int64_t most,
                 const Options& options) {
  Draft draft;
  most = std::min(most, static_cast<int64_t>(options.factor * matches.length));
  double likely = 1;
  for (int64_t i = 0; i < most; i++) {
    int32_t next[kMostVotes], best = -1;
    int64_t known = 0, votes = 0;
    for (int64_t j = 0; j < matches.count; j++) {
      const int64_t ahead = i + 1 - matches.age[j];  // 0: the place after the indexed tokens
      const int32_t token = !own || ahead <= 0 ? index.token[index.place(-ahead)]
                                               : draft.token[ahead - 1];
      if (token < 0) continue;
      matches.age[known] = matches.age[j];
      next[known++] = token;
    }
    for (int64_t j = 0; j < known - votes; j++) {
      const int64_t same = std::count(next + j, next + known, next[j]);
      if (same > votes) votes = same, best = next[j];
    }
    if (!known || (likely *= static_cast<double>(votes) / known) < options.least) break;
    draft.token[draft.count++] = best;
    draft.expected += likely;
    matches.count = 0;
    for (int64_t j = 0; j < known; j++)
      if (next[j] == best) matches.age[matches.count++] = matches.age[j];
  }
  return draft;
}

struct Requests {
  const int64_t *slot, *length, *most, *others;  // others: number of other indexes to search
  int64_t *token_BK, *num_B;
  double* expected_B;
  int64_t count, columns;
};

void propose(SuffixIndex* own_S, const SuffixIndex* others, const Requests& requests, int64_t b,
             const Options& options) {
  SuffixIndex& own = own_S[requests.slot[b]];
  const int64_t length = requests.length[b], most = std::min(requests.most[b], kMostDrafts);
  while (own.size < length - 1) own.append();  // the last token has no continuation yet
  Draft best;
  for (int64_t i = -1; i < requests.others[b]; i++) {
    const SuffixIndex& index = i < 0 ? own : others[i];
    const Matches matches = find_matches(index, own.token, length, options.depth);
    const Draft draft = draft_from(index, matches, i < 0, most, options);
    if (draft.expected > best.expected) best = draft;
  }
  int64_t* token_K = requests.token_BK + b * requests.columns;
  std::copy(best.token, best.token + best.count, token_K);
  std::fill(token_K + best.count, token_K + requests.columns, -1);
  requests.num_B[b] = best.count;
  requests.expected_B[b] = best.expected;
}
}  // namespace
}  // namespace foretoken

using namespace foretoken;

extern "C" {
// Index the `count` tokens of the ring from `end` on.
int foretoken_suffix_append(SuffixIndex* index, int64_t count) {
  for (; count > 0; count--) index->append();
  return kDone;
}

int foretoken_suffix_propose(SuffixIndex* own_S, const SuffixIndex* others,
                             const Requests* requests, int64_t depth, double factor,
                             double least) {
  return guarded([&] {
    const Options options{depth, factor, least};
    for (int64_t b = 0; b < requests->count; b++)  // some 5 us, too short for a second thread
      propose(own_S, others, *requests, b, options);
  });
}
}
