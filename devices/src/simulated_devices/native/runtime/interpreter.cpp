#include "interpreter.h"

#include <dlfcn.h>

namespace simulated {
namespace {

template <typename F>
F* symbol(const char* name) {
  return reinterpret_cast<F*>(dlsym(RTLD_DEFAULT, name));
}

struct Python {
  int (*is_initialized)() = symbol<int()>("Py_IsInitialized");
  void* (*state_of_thread)() = symbol<void*()>("PyGILState_GetThisThreadState");
  int (*has_gil)() = symbol<int()>("PyGILState_Check");
  void* (*save)() = symbol<void*()>("PyEval_SaveThread");
  void (*restore)(void*) = symbol<void(void*)>("PyEval_RestoreThread");

  bool is_there() const { return is_initialized && state_of_thread && has_gil && save && restore; }
};

const Python& python() {
  static const Python found;
  return found;
}

}  // namespace

WithoutGil::WithoutGil() {
  const Python& py = python();
  if (py.is_there() && py.is_initialized() && py.state_of_thread() && py.has_gil()) state_ = py.save();
}

WithoutGil::~WithoutGil() {
  if (state_) python().restore(state_);
}

}  // namespace simulated
