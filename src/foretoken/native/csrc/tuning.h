// Which way of fetching weights is the fastest on this machine, by measurement.
//
// No other way tells: past the caches was as fast as any on one AMD core and five times as slow as
// no hint at all on a Xeon whose L3 holds the weights.
#pragma once

#include "gemm.h"

namespace foretoken {

// Mirrored by `native/library.py`.
struct Tuning {
  Fetches chosen;
  double one[kFetches], few[kFetches];  // best seconds of a pass over the weights
};

// On this thread alone: takes a few dozen passes over `weights`, or over their first 256 MiB.
Tuning measure_fetches(const std::vector<const Packed*>& weights);

}  // namespace foretoken
