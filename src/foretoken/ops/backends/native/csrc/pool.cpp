#include "pool.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
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

constexpr int kSpins = 4000;  // about 50 us: the gap between the loops of one forward pass, and more

struct Pool {
  // High half: number of the job; low half: tiles not yet taken. Taking one is a compare-and-swap,
  // so a tile belongs to the job whose number was read with it.
  std::atomic<uint64_t> ticket{0};
  std::atomic<int64_t> unfinished{0};
  std::atomic<Tile> tile{nullptr};
  std::atomic<void*> context{nullptr};
  std::atomic<int> sleeping{0};
  std::atomic<bool> stop{false}, failed{false};
  std::mutex owner, sleep;
  std::condition_variable wake;
  std::vector<std::thread> workers;
  pid_t process = getpid();
  const int size;  // threads wanted, the calling one included

  explicit Pool(int threads) : size(threads) {
    workers.reserve(threads);  // what may throw beside the system comes before the first thread
    try {
      for (int i = 1; i < threads; i++) workers.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
      // The system gives no more threads: those that there are share the work.
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

  bool take_one() {
    uint64_t seen = ticket.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(seen)) {
      if (ticket.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel)) {
        try {
          tile.load(std::memory_order_relaxed)(context.load(std::memory_order_relaxed),
                                               static_cast<uint32_t>(seen) - 1);
        } catch (...) {  // the only thing that tiles do that may throw is to allocate
          failed = true;
        }
        unfinished.fetch_sub(1, std::memory_order_release);
        return true;
      }
    }
    return false;
  }

  void work() {
    int idle = 0;
    while (!stop.load(std::memory_order_relaxed)) {
      if (take_one()) {
        idle = 0;
      } else if (++idle < kSpins) {
        relax();
      } else {
        std::unique_lock<std::mutex> lock(sleep);
        sleeping.fetch_add(1);
        wake.wait(lock, [this] { return stop || static_cast<uint32_t>(ticket.load()); });
        sleeping.fetch_sub(1);
        idle = 0;
      }
    }
  }

  void run(int64_t count, Tile new_tile, void* new_context) {
    tile.store(new_tile, std::memory_order_relaxed);
    context.store(new_context, std::memory_order_relaxed);
    unfinished.store(count, std::memory_order_relaxed);
    uint64_t job = (ticket.load(std::memory_order_relaxed) >> 32) + 1;
    ticket.store(job << 32 | static_cast<uint64_t>(count));
    if (sleeping.load()) {
      { std::lock_guard<std::mutex> lock(sleep); }
      wake.notify_all();
    }
    while (take_one()) {
    }
    for (int spins = 0; unfinished.load(std::memory_order_acquire); spins++) {
      if (spins < kSpins) {
        relax();
      } else {
        std::this_thread::yield();  // a worker that holds a tile may be waiting for this core
      }
    }
    if (failed.exchange(false)) throw std::bad_alloc();
  }
};

std::mutex pool_lock;
std::atomic<int> wanted{1};
// Never destroyed at exit: a forked child would wait for threads that it does not have.
std::shared_ptr<Pool>& pool = *new std::shared_ptr<Pool>;

// The pool of this process and of the threads wanted now. One that is replaced lives on while
// another Python thread computes with it; a parent's is left alone: threads do not survive a fork.
std::shared_ptr<Pool> current() {
  std::lock_guard<std::mutex> lock(pool_lock);
  if (pool && pool->process != getpid()) new std::shared_ptr<Pool>(std::move(pool));
  if (!pool || pool->size != wanted) pool = std::make_shared<Pool>(wanted);
  return pool;
}

}  // namespace

void parallel(int64_t count, Tile tile, void* context) {
  if (wanted > 1) {
    const std::shared_ptr<Pool> shared = current();
    std::unique_lock<std::mutex> own(shared->owner, std::try_to_lock);
    if (own) return shared->run(count, tile, context);
  }
  for (int64_t i = 0; i < count; i++) tile(context, i);
}

extern "C" int foretoken_set_num_threads(int64_t count) {
  wanted = static_cast<int>(count);
  return kDone;
}

}  // namespace foretoken
