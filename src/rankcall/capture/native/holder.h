// The Python object that stands for a recorder.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "recorder.h"

namespace rankcall {
namespace {

// The ring's memory belongs to Python; the buffer is held until release().
struct Holder {
  Py_buffer buffer{};
  Recorder* recorder = nullptr;
};

void release_holder(PyObject* capsule) {
  auto* holder = static_cast<Holder*>(PyCapsule_GetPointer(capsule, "rankcall.recorder"));
  if (holder->recorder->ring.drained()) PyBuffer_Release(&holder->buffer);
  delete holder;  // the recorder itself stays: a kernel may just have loaded its address
}

Holder* holder_of(PyObject* capsule) {
  return static_cast<Holder*>(PyCapsule_GetPointer(capsule, "rankcall.recorder"));
}

}  // namespace
}  // namespace rankcall
