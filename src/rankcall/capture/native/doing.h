// What a thread is doing, as far as functions of torch on its stack say: a look at one moment.
//
// Called with the GIL, which is not released before it returns, so the frames stand still. It makes
// no frame objects but those of sys._current_frames(), and keeps none: no local variable of the
// user's lives longer for it. Some microseconds for a stack of some 50 frames.
#pragma once

#include <Python.h>

#include <cstring>

#include "frames.h"

namespace rankcall {

enum Doing : int { kUnknownDoing = -1, kNothingKnown, kDataLoader, kCheckpoint, kCompilation };

#if RANKCALL_FRAMES
// Functions that take long, by the end of their file's path. The innermost one on a stack counts. A
// call of torch.distributed inside a checkpoint waits for other ranks: that is nobody's own work.
inline Doing doing_in(PyCodeObject* code) {
  struct Known {
    const char* file;
    const char* function;  // null: any
    Doing doing;
  };
  static constexpr Known known[] = {
      {"/torch/distributed/distributed_c10d.py", nullptr, kNothingKnown},
      {"/torch/utils/data/dataloader.py", "__next__", kDataLoader},
      {"/torch/utils/data/dataloader.py", "__iter__", kDataLoader},  // starts the workers
      {"/torchdata/stateful_dataloader/stateful_dataloader.py", "__next__", kDataLoader},
      {"/torchdata/stateful_dataloader/stateful_dataloader.py", "__iter__", kDataLoader},
      {"/torch/serialization.py", "save", kCheckpoint},
      {"/torch/serialization.py", "load", kCheckpoint},
      {"/torch/distributed/checkpoint/state_dict_saver.py", "save", kCheckpoint},
      {"/torch/distributed/checkpoint/state_dict_saver.py", "async_save", kCheckpoint},
      {"/torch/distributed/checkpoint/state_dict_loader.py", "load", kCheckpoint},
      {"/torch/_dynamo/convert_frame.py", "_compile", kCompilation},
      {"/torch/_inductor/compile_fx.py", "compile_fx_inner", kCompilation},  // also of a backward
      {"/triton/compiler/compiler.py", "compile", kCompilation},
  };
  const char* file = text(code->co_filename);
  const char* function = text(code->co_name);
  const size_t length = std::strlen(file);
  for (const Known& one : known) {
    const size_t end = std::strlen(one.file);
    if (length >= end && !std::memcmp(file + length - end, one.file, end) &&
        (!one.function || !std::strcmp(function, one.function)))
      return one.doing;
  }
  return kUnknownDoing;
}
#endif

// `thread` is Python's number of a thread, `current_frames` is sys._current_frames.
inline Doing doing_of([[maybe_unused]] PyObject* current_frames, [[maybe_unused]] unsigned long thread) {
  Doing doing = kUnknownDoing;
#if RANKCALL_FRAMES
  // A collection might run Python code, which may release the GIL.
  const bool collects = PyGC_Disable();
  PyObject* frames = current_frames ? PyObject_CallNoArgs(current_frames) : nullptr;
  PyObject* number = PyLong_FromUnsignedLong(thread);
  PyObject* object = frames && number ? PyDict_GetItemWithError(frames, number) : nullptr;
  if (object) {
    doing = kNothingKnown;
    // Python's own limit on recursion, as in callsite.h.
    Frame frame = frame_of(object);
    for (int depth = 0; frame && depth < 1000; frame = back(frame), depth++) {
      if (is_shim(frame)) continue;
      const Doing here = doing_in(code_of(frame));
      if (here == kUnknownDoing) continue;
      doing = here;
      break;
    }
  }
  PyErr_Clear();
  Py_XDECREF(number);
  Py_XDECREF(frames);
  if (collects) PyGC_Enable();
#endif
  return doing;
}

}  // namespace rankcall
