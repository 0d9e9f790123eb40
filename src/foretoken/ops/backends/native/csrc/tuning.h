// Which way of fetching weights is the fastest on this machine, by measurement.
//
// It cannot be known beforehand: past the caches is as fast as any on a Zen 5, and four times as slow
// on a Xeon whose L3 holds the weights.
#pragma once

#include "gemm.h"

namespace foretoken {

// The fastest fetches, and the best seconds of a pass over the weights by each, for one row and for
// kRows. Takes up to 60 passes over `weights`, or over their first 256 MiB, fewer where these take
// long; with the threads now in force.
Fetches measure_fetches(const std::vector<const Packed*>& weights, double seconds[2][kFetches]);

}  // namespace foretoken
