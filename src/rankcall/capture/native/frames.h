// The interpreter's frames, of the Python versions whose layout is known. Needs no torch.
#pragma once

#include <Python.h>
#if PY_VERSION_HEX >= 0x030A0000 && PY_VERSION_HEX < 0x030E0000 && !defined(Py_GIL_DISABLED)
#define RANKCALL_FRAMES 1
#else
#define RANKCALL_FRAMES 0  // frame layout unknown: call sites and phases of torch are off
#endif
#if RANKCALL_FRAMES && PY_VERSION_HEX >= 0x030B0000
#define Py_BUILD_CORE 1
#include "internal/pycore_frame.h"
#undef Py_BUILD_CORE
#elif RANKCALL_FRAMES
#include <frameobject.h>
#endif

#include <cstdint>

namespace rankcall {

#if RANKCALL_FRAMES
#if PY_VERSION_HEX >= 0x030B0000
using Frame = _PyInterpreterFrame*;
#else
using Frame = PyFrameObject*;
#endif

inline Frame top(PyThreadState* thread) {
#if PY_VERSION_HEX >= 0x030D0000
  return thread->current_frame;
#elif PY_VERSION_HEX >= 0x030B0000
  return thread->cframe->current_frame;
#else
  return thread->frame;
#endif
}
inline Frame back(Frame frame) {
#if PY_VERSION_HEX >= 0x030B0000
  return frame->previous;
#else
  return frame->f_back;
#endif
}
inline bool is_shim([[maybe_unused]] Frame frame) {
#if PY_VERSION_HEX >= 0x030C0000
  return frame->owner == FRAME_OWNED_BY_CSTACK;
#else
  return false;
#endif
}
inline PyCodeObject* code_of(Frame frame) {
#if PY_VERSION_HEX >= 0x030D0000
  return reinterpret_cast<PyCodeObject*>(frame->f_executable);
#else
  return frame->f_code;
#endif
}
inline intptr_t offset_of(Frame frame, [[maybe_unused]] PyCodeObject* code) {
#if PY_VERSION_HEX >= 0x030D0000
  return reinterpret_cast<intptr_t>(frame->instr_ptr) - reinterpret_cast<intptr_t>(_PyCode_CODE(code));
#elif PY_VERSION_HEX >= 0x030B0000
  return reinterpret_cast<intptr_t>(frame->prev_instr) - reinterpret_cast<intptr_t>(_PyCode_CODE(code));
#else
  return static_cast<intptr_t>(frame->f_lasti) * 2;
#endif
}
inline Frame frame_of(PyObject* frame) {
#if PY_VERSION_HEX >= 0x030B0000
  return reinterpret_cast<PyFrameObject*>(frame)->f_frame;
#else
  return reinterpret_cast<PyFrameObject*>(frame);
#endif
}
#endif

// A string of the interpreter's; with the GIL.
inline const char* text(PyObject* unicode) {
  const char* utf8 = PyUnicode_AsUTF8(unicode);
  if (!utf8) PyErr_Clear();
  return utf8 ? utf8 : "?";
}

}  // namespace rankcall
