#include "pool.h"
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>
#include "call.h"

namespace foretoken {
namespace {
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

using Clock = std::chrono::steady_clock;

// An idle thread spins for longer than the gap between the loops of a pass; then it yields its core for
// longer than the gap between the passes of a decode step, since waking a thread takes some 50 us.
constexpr std::chrono::microseconds kSpin(50);
constexpr std::chrono::microseconds kYield(600);

// A part of the tiles of a job (a call of `parallel`), equal in all jobs with equally many tiles.
struct alignas(64) Share {
  // High half: number of the job; low half: tiles left. Compare-and-swap takes a tile of this job.
  std::atomic<uint64_t> ticket{0};
};
constexpr int kMostShares = 16;  // each thread looks at all of them in every job

struct Pool {
  Share shares[kMostShares];
  std::atomic<uint64_t> job{0};  // the latest job with all its tickets written
  std::atomic<int64_t> unfinished{0}, count{0};
  std::atomic<Tile> tile{nullptr};
  std::atomic<void*> context{nullptr};
  std::atomic<int> sleeping{0};
  std::atomic<bool> stop{false}, failed{false};
  std::mutex owner, sleep;
  std::condition_variable wake;
  std::vector<std::thread> workers;
  pid_t process = getpid();
  const int size;  // requested number of threads, including the calling thread
  const int64_t parts = std::min(size, kMostShares);

  explicit Pool(int threads) : size(threads) {
    workers.reserve(threads);  // may throw bad_alloc, which must be before the first thread
    try {
      for (int i = 1; i < threads; i++) workers.emplace_back([this, i] { work(i); });
    } catch (const std::system_error&) {  // no more threads: the existing threads share the work
    }
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(sleep);
      stop = true;
    }
    wake.notify_all();
    for (auto& worker : workers) worker.join();
  }

  // Run a tile of a share; returns false if none is left.
  bool run_tile(int64_t part) {
    std::atomic<uint64_t>& ticket = shares[part].ticket;
    uint64_t seen = ticket.load(std::memory_order_acquire);
    while (const int64_t left = static_cast<uint32_t>(seen)) {
      if (ticket.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel)) {
        try {
          const int64_t end = (part + 1) * count.load(std::memory_order_relaxed) / parts;
          tile.load(std::memory_order_relaxed)(context.load(std::memory_order_relaxed), end - left);
        } catch (...) {  // tiles throw only when an allocation fails
          failed = true;
        }
        return true;
      }
    }
    return false;
  }

  // Run the tiles that are left of the job, those of the thread's own share first.
  void run_tiles(int64_t thread) {
    int64_t done = 0;
    for (int64_t i = 0; i < parts; i++)
      while (run_tile((thread + i) % parts)) done++;
    if (done) unfinished.fetch_sub(done, std::memory_order_release);
  }

  void work(int64_t thread) {
    uint64_t last = 0;
    auto since = Clock::now();
    while (!stop.load(std::memory_order_relaxed)) {
      if (const uint64_t next = job.load(std::memory_order_acquire); next != last) {
        run_tiles(thread);
        last = next;
        since = Clock::now();
      } else if (const auto idle = Clock::now() - since; idle < kSpin) {
        relax();
      } else if (idle < kYield) {
        std::this_thread::yield();
      } else {
        std::unique_lock<std::mutex> lock(sleep);
        sleeping.fetch_add(1);
        wake.wait(lock, [&] { return stop || job.load() != last; });
        sleeping.fetch_sub(1);
        since = Clock::now();
      }
    }
  }

  void run(int64_t new_count, Tile new_tile, void* new_context) {
    tile.store(new_tile, std::memory_order_relaxed);
    context.store(new_context, std::memory_order_relaxed);
    count.store(new_count, std::memory_order_relaxed);
    unfinished.store(new_count, std::memory_order_relaxed);
    const uint64_t next = job.load(std::memory_order_relaxed) + 1;
    for (int64_t i = 0; i < parts; i++) {
      const uint64_t tiles = (i + 1) * new_count / parts - i * new_count / parts;
      shares[i].ticket.store(next << 32 | tiles, std::memory_order_release);
    }
    job.store(next);
    if (sleeping.load()) {
      { std::lock_guard<std::mutex> lock(sleep); }
      wake.notify_all();
    }
    run_tiles(0);
    const auto since = Clock::now();
    while (unfinished.load(std::memory_order_acquire)) {
      if (Clock::now() - since < kSpin) {
        relax();
      } else {
        std::this_thread::yield();  // a worker may be waiting for this core to finish its tile
      }
    }
    if (failed.exchange(false)) throw std::bad_alloc();
  }
};

std::mutex pool_lock;
std::atomic<int> num_threads{1};
// Not destroyed at exit: a forked child would wait for threads that exist only in its parent.
std::shared_ptr<Pool>& pool = *new std::shared_ptr<Pool>;

// The pool of this process with `num_threads` threads. A replaced pool lives on while another Python
// thread uses it; a forked child leaks the pool of its parent, since threads do not survive a fork.
std::shared_ptr<Pool> current_pool() {
  std::lock_guard<std::mutex> lock(pool_lock);
  if (pool && pool->process != getpid()) new std::shared_ptr<Pool>(std::move(pool));
  if (!pool || pool->size != num_threads) pool = std::make_shared<Pool>(num_threads);
  return pool;
}
}  // namespace

void parallel(int64_t count, Tile tile, void* context) {
  if (num_threads > 1) {
    const std::shared_ptr<Pool> shared = current_pool();
    std::unique_lock<std::mutex> own(shared->owner, std::try_to_lock);
    if (own) return shared->run(count, tile, context);
  }
  for (int64_t i = 0; i < count; i++) tile(context, i);
}

extern "C" int foretoken_set_num_threads(int64_t count) {
  num_threads = static_cast<int>(count);
  return kDone;
}
}  // namespace foretoken
