// The status of functions that Python calls by ctypes: those in `extern "C"`, at the end of files.
#pragma once
#include <cstdio>
#include <new>
#include <stdexcept>

namespace foretoken {
enum Status { kDone, kNotCovered, kNoMemory, kFailed, kMisfit, kNotFinite };

// The engine's own numbers contradict each other: `IntegrityError` in Python.
struct Misfit : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// A scale of the weights is NaN or infinite, since their file is damaged.
struct NotFinite {};
inline thread_local char misfit[200];  // the message of this thread's latest Misfit

// Do work(), and turn its exceptions, which must not cross into Python's frames, into a status.
template <typename Work>
int guarded(const Work& work) {
  try {
    work();
    return kDone;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  } catch (const Misfit& error) {
    std::snprintf(misfit, sizeof misfit, "%s", error.what());
    return kMisfit;
  } catch (const NotFinite&) {
    return kNotFinite;
  } catch (...) {
    return kFailed;
  }
}
}  // namespace foretoken
