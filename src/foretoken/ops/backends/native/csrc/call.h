// How a call from Python ends. The functions that Python calls, by ctypes, are `extern "C"`, the last
// in their files; their arguments have been checked in Python.
#pragma once

#include <new>

namespace foretoken {

enum Status { kDone, kNotCovered, kNoMemory, kFailed };

// An exception must not cross into Python's frames.
template <typename Work>
int guarded(const Work& work) {
  try {
    work();
    return kDone;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  } catch (...) {
    return kFailed;
  }
}

}  // namespace foretoken
