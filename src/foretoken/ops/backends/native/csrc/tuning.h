// Which way of fetching weights is the fastest on this machine, by measurement.
//
// Nothing else tells: past the caches is as fast as any on a Zen 5, and four times as slow on a Xeon
// whose L3 holds the weights.
#pragma once

#include "gemm.h"

namespace foretoken {

// Mirrored by `native/library.py`.
struct Tuning {
  Fetches chosen;
  double one[kFetches], few[kFetches];  // best seconds of a pass over the weights
};

// Takes up to 60 passes over `weights`, or over their first 256 MiB, fewer where these take long; with
// the threads now in force.
Tuning measure_fetches(const std::vector<const Packed*>& weights);

}  // namespace foretoken
