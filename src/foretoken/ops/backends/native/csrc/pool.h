// Threads that share the tiles of one loop. Each thread begins with the same part in every loop, and
// then helps the others: weights that it read in the last pass may still be in its cache (a speculative
// step of the embedded pair takes 4 to 8 % less on two cores than with one queue). Tiles are taken one
// by one, so a thread that the system has suspended delays only its current tile, and the count of
// those it has done. (An OpenMP team waits for its slowest member at every loop: on a busy 2-core
// machine a decode step went from 7 to 77 ms.)
#pragma once

#include <cstdint>

namespace foretoken {

using Tile = void (*)(void* context, int64_t index);

// Run tile(context, i) for i in [0, count), each once, on this thread and the pool's. Calls from
// other threads while the pool is busy use only their own thread. If a tile throws, the others still
// run, then std::bad_alloc is thrown here.
void parallel(int64_t count, Tile tile, void* context);

// `work(i)` for i in [0, count): in parallel, or on this thread if `worth` is false.
template <typename Work>
void parallel_for(int64_t count, bool worth, const Work& work) {
  if (!worth || count < 2) {
    for (int64_t i = 0; i < count; i++) work(i);
    return;
  }
  parallel(
      count, [](void* context, int64_t i) { (*static_cast<const Work*>(context))(i); },
      const_cast<Work*>(&work));
}

}  // namespace foretoken
