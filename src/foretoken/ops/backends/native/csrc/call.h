// The status of a call from Python. Functions that Python calls, by ctypes, are `extern "C"`, at the
// end of their files; Python has checked their arguments.
#pragma once

#include <cstdio>
#include <new>
#include <stdexcept>

namespace foretoken {

enum Status { kDone, kNotCovered, kNoMemory, kFailed, kMisfit, kNotFinite };

// The engine's own numbers contradict each other. Python raises it as `IntegrityError`.
struct Misfit : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// A weight's scale is NaN or infinite: its file is damaged.
struct NotFinite : std::runtime_error {
  using std::runtime_error::runtime_error;
};
inline thread_local char misfit[200];  // the message of the last one

// An exception must not cross into Python's frames.
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
