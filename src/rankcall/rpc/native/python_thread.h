// What a native thread that runs Python and torch code needs around it.
#pragma once

#include <ATen/record_function.h>
#include <Python.h>

namespace rankcall {

// Keeps one Python thread state for a native thread: making one for each call is slow.
class PythonThread {
 public:
  PythonThread() : gil_(PyGILState_Ensure()), state_(PyEval_SaveThread()) {}
  ~PythonThread() {
    PyEval_RestoreThread(state_);
    PyGILState_Release(gil_);
  }

 private:
  PyGILState_STATE gil_;
  PyThreadState* state_;
};

// torch leaves the profiler of a caller's request on the thread that served it; the next one that
// the thread serves would record each operator twice, and torch drops such doubles from the profile.
inline void forget_profilers() {
  if (at::hasThreadLocalCallbacks()) at::clearThreadLocalCallbacks();
}

}  // namespace rankcall
