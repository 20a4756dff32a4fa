// The line that issued an op, from this thread's interpreter frames: no GIL, no wrappers, ~15 ns.
//
// A thread's own frames stand still while it is inside a C call, so they can be read without the
// GIL. The GIL is taken once for each new code object and line, which code_table.h remembers, and
// once a step by an autograd thread, which has no frames of its own. Needs no torch.
#pragma once

#include <Python.h>
#if PY_VERSION_HEX >= 0x030A0000 && PY_VERSION_HEX < 0x030E0000 && !defined(Py_GIL_DISABLED)
#define RANKCALL_FRAMES 1
#else
#define RANKCALL_FRAMES 0  // frame layout unknown: call sites are off
#endif
#if RANKCALL_FRAMES && PY_VERSION_HEX >= 0x030B0000
#define Py_BUILD_CORE 1
#include "internal/pycore_frame.h"
#undef Py_BUILD_CORE
#elif RANKCALL_FRAMES
#include <frameobject.h>
#endif

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "code_table.h"
#include "thread.h"

namespace rankcall {

inline std::string json_text(const char* text) {
  std::string out = "\"";
  for (; text && *text; text++) {
    const unsigned char c = static_cast<unsigned char>(*text);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += *text;
    } else if (c < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", c);
      out += escape;
    } else {
      out += *text;
    }
  }
  return out + '"';
}

// Holds the GIL, with the garbage collector off: a collection may run any Python code, which may
// release the GIL or issue a collective while the caller is halfway through an update.
//
// Does not hold it (see held()) once the interpreter is finalizing: asking for it then would end the
// calling thread.
class GilGuard {
 public:
  GilGuard() : held_(!finalizing()) {
    if (!held_) return;
    state_ = PyGILState_Ensure();
    collects_ = PyGC_Disable();
  }
  ~GilGuard() {
    if (!held_) return;
    if (collects_) PyGC_Enable();
    PyGILState_Release(state_);
  }
  GilGuard(const GilGuard&) = delete;
  GilGuard& operator=(const GilGuard&) = delete;

  bool held() const { return held_; }

 private:
  static bool finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing() || !Py_IsInitialized();
#else
    return _Py_IsFinalizing() || !Py_IsInitialized();
#endif
  }

  bool held_;
  bool collects_ = false;
  PyGILState_STATE state_{};
};

class CallSites {
 public:
  struct Found {
    uint32_t site = 0;
    bool continues = false;  // same public call as this thread's last op
  };
  // Called with the GIL held, once per new site, with its side-table entry, and of that the JSON of
  // "file:line" and the public function; returns the side-table id.
  using Emit = uint32_t (*)(void*, const std::string& entry, const std::string& source, const char* api);

  // Start over for a new ring. Call with the GIL. `skip` are path prefixes of frames to pass over; they
  // count for code objects that are met from now on.
  void reset(std::vector<std::string> skip, Emit emit, void* context) {
    skip_ = std::move(skip);
    emit_ = emit;
    context_ = context;
    ids_.clear();
    ring_.fetch_add(1, std::memory_order_release);
#if RANKCALL_FRAMES
    if (!current_frames_) {
      current_frames_ = PySys_GetObject("_current_frames");
      Py_XINCREF(current_frames_);
    }
#endif
  }

  // For tests: how often find() has taken the GIL for something new, how many code objects are known.
  uint64_t gil_taken() const { return gil_taken_.load(std::memory_order_relaxed); }
#if RANKCALL_FRAMES
  size_t codes() const { return codes_.size(); }
#endif

#if !RANKCALL_FRAMES
  Found find(uint64_t) { return {}; }
#else
  // Find the caller of the op that this thread is in. `moment` changes when a thread without Python
  // frames (an autograd device thread) has to look again who called backward().
  Found find(uint64_t moment) {
    PyThreadState* thread = PyGILState_GetThisThreadState();
    Walk walk;
    if (thread) walk = walk_from(top(thread));
    if (!walk.user) return {backward_site(moment), false};
    return {site_of(walk), walk.many && continues(thread, walk.api_frame)};
  }

 private:
#if PY_VERSION_HEX >= 0x030B0000
  using Frame = _PyInterpreterFrame*;
#else
  using Frame = PyFrameObject*;
#endif

  enum Kind : uint8_t { kUser, kHidden, kWrapper, kApi, kApiOfMany, kBackward };

  struct Walk {
    PyCodeObject* user = nullptr;
    PyCodeObject* api = nullptr;  // the outermost function of torch that is not a mere wrapper
    Code* user_known = nullptr;   // their entries in codes_: null if there was no room
    Code* api_known = nullptr;
    Frame api_frame = nullptr;
    intptr_t offset = 0;  // of the instruction in `user`, in bytes
    bool many = false;    // the api issues several ops in one call
    bool backward = false;
  };

  static Frame top(PyThreadState* thread) {
#if PY_VERSION_HEX >= 0x030D0000
    return thread->current_frame;
#elif PY_VERSION_HEX >= 0x030B0000
    return thread->cframe->current_frame;
#else
    return thread->frame;
#endif
  }
  static Frame back(Frame frame) {
#if PY_VERSION_HEX >= 0x030B0000
    return frame->previous;
#else
    return frame->f_back;
#endif
  }
  static bool is_shim([[maybe_unused]] Frame frame) {
#if PY_VERSION_HEX >= 0x030C0000
    return frame->owner == FRAME_OWNED_BY_CSTACK;
#else
    return false;
#endif
  }
  static PyCodeObject* code_of(Frame frame) {
#if PY_VERSION_HEX >= 0x030D0000
    return reinterpret_cast<PyCodeObject*>(frame->f_executable);
#else
    return frame->f_code;
#endif
  }
  static intptr_t offset_of(Frame frame, [[maybe_unused]] PyCodeObject* code) {
#if PY_VERSION_HEX >= 0x030D0000
    return reinterpret_cast<intptr_t>(frame->instr_ptr) - reinterpret_cast<intptr_t>(_PyCode_CODE(code));
#elif PY_VERSION_HEX >= 0x030B0000
    return reinterpret_cast<intptr_t>(frame->prev_instr) - reinterpret_cast<intptr_t>(_PyCode_CODE(code));
#else
    return static_cast<intptr_t>(frame->f_lasti) * 2;
#endif
  }

  Walk walk_from(Frame frame) {
    Walk walk;
    for (int depth = 0; frame && depth < 1000; frame = back(frame), depth++) {
      if (is_shim(frame)) continue;
      PyCodeObject* code = code_of(frame);
      Code* known = codes_.find(code);
      const Kind kind = known ? static_cast<Kind>(known->kind) : learn(code, known);
      if (kind == kUser) {
        walk.user = code;
        walk.user_known = known;
        walk.offset = offset_of(frame, code);
        return walk;
      }
      if (kind >= kApi) {
        walk.api = code;
        walk.api_known = known;
        walk.api_frame = frame;
        walk.many = kind == kApiOfMany;
        walk.backward |= kind == kBackward;
      }
    }
    return walk;
  }

  // Classify a new code object, and remember it.
  Kind learn(PyCodeObject* code, Code*& known) {
    GilGuard gil;
    if (!gil.held()) return kHidden;
    gil_taken_.fetch_add(1, std::memory_order_relaxed);
    const Kind kind = classify(code);
    known = codes_.add(code, kind);
    return kind;
  }

  Kind classify(PyCodeObject* code) const {
    const std::string file = text(code->co_filename);
    const std::string name = text(code->co_name);
    if (file.rfind("<frozen ", 0) == 0 || file.rfind("<eval_with_key>", 0) == 0 ||
        file.find("/torchinductor_") != std::string::npos)
      return kHidden;
    // Frames between the user and torch's context managers and deprecated functions.
    for (const std::string between : {"/contextlib.py", "/typing_extensions.py", "/warnings.py"})
      if (file.size() >= between.size() && !file.compare(file.size() - between.size(), between.size(), between))
        return kHidden;
    bool ours = false;
    for (const auto& prefix : skip_) ours |= file.compare(0, prefix.size(), prefix) == 0;
    if (!ours) return kUser;
    static const std::unordered_set<std::string> wrappers = {
        "wrapper", "inner", "wrapped", "_wrapped_call_impl", "_call_impl", "decorate_context", "_fn"};
    if (name == "_engine_run_backward") return kBackward;
    if (wrappers.count(name) || file.find("c10d_logger.py") != std::string::npos) return kWrapper;
    if (name == "batch_isend_irecv" || name.find("object") != std::string::npos) return kApiOfMany;
    return kApi;
  }

  // The side-table id of a line. It is remembered together with the number of the ring that it is for.
  uint32_t site_of(const Walk& walk) {
    const bool known = walk.user_known && (walk.api_known || !walk.api);
    const uint64_t api = walk.api_known ? walk.api_known->serial : CodeTable::kNoSerial;
    const uint64_t key = static_cast<uint64_t>(walk.offset) << 32 | api;
    const uint64_t ring = ring_.load(std::memory_order_acquire);
    if (known) {
      const auto* line = walk.user_known->line(key);
      const uint64_t value = line ? line->load(std::memory_order_acquire) : 0;
      if (value >> 32 == ring) return static_cast<uint32_t>(value);
    }
    GilGuard gil;
    if (!gil.held()) return 0;
    gil_taken_.fetch_add(1, std::memory_order_relaxed);
    const uint32_t id = id_of(walk);
    if (known) codes_.remember(*walk.user_known, key, ring << 32 | id);
    return id;
  }

  uint32_t id_of(const Walk& walk) {
    const int line = PyCode_Addr2Line(walk.user, static_cast<int>(walk.offset));
    const std::string file = json_text(text(walk.user->co_filename));
    const std::string number = std::to_string(line > 0 ? line : walk.user->co_firstlineno);
    const char* api = walk.api ? text(walk.api->co_name) : "";
    std::string json = "{\"file\": " + file + ", \"line\": " + number + ", \"function\": " +
                       json_text(text(walk.user->co_name)) + ", \"api\": " + json_text(api) + "}";
    auto known = ids_.find(json);
    if (known != ids_.end()) return known->second;
    if (ids_.size() >= kMaxSites) return 0;
    const std::string source = file.substr(0, file.size() - 1) + ":" + number + "\"";
    const uint32_t id = emit_(context_, json, source, api);
    return ids_[std::move(json)] = id;
  }

  // --- which ops belong to one call of a function that issues several ---
  // A frame's address is used again by the next call. A new frame has no frame object, so one is
  // made at the first op of a call: it marks the frame for as long as the call lasts.
  static bool continues(PyThreadState* thread, Frame frame) {
    const void*& last = this_thread().call_frame;
    const bool same = frame == last && is_marked(frame);
    last = frame;
    if (!same) mark(thread, frame);
    return same;
  }
#if PY_VERSION_HEX >= 0x030B0000
  static bool is_marked(Frame frame) { return frame->frame_obj != nullptr; }
  static void mark(PyThreadState* thread, Frame frame) {
    GilGuard gil;
    if (!gil.held()) return;
    PyFrameObject* object = PyThreadState_GetFrame(thread);
    while (object && object->f_frame != frame) {
      PyFrameObject* next = PyFrame_GetBack(object);
      Py_DECREF(object);
      object = next;
    }
    Py_XDECREF(object);
  }
#else
  static bool is_marked(Frame frame) { return frame->f_trace_opcodes != 0; }
  static void mark(PyThreadState*, Frame frame) { frame->f_trace_opcodes = 1; }
#endif

  // --- ops issued by autograd's device threads, which have no Python frames of their own ---
  // Other threads' frames stand still while this one holds the GIL, but the interpreter links a
  // thread before it has set it up, and does so without the GIL. sys._current_frames() knows which
  // threads are whole. A step's first op pays some microseconds for it.
  uint32_t backward_site(uint64_t moment) {
    Thread& self = this_thread();
    moment += ring_.load(std::memory_order_relaxed) << 40;
    if (moment == self.backward_moment) return self.backward_site;
    self.backward_moment = moment;
    self.backward_site = 0;
    GilGuard gil;
    if (!gil.held() || !current_frames_) return 0;
    PyObject* frames = PyObject_CallNoArgs(current_frames_);
    PyObject* frame;
    Py_ssize_t at = 0;
    while (frames && PyDict_Next(frames, &at, nullptr, &frame)) {
      const Walk walk = walk_from(frame_of(frame));
      if (walk.user && walk.backward) {
        self.backward_site = site_of(walk);
        break;
      }
    }
    if (!frames) PyErr_Clear();
    Py_XDECREF(frames);
    return self.backward_site;
  }
  static Frame frame_of(PyObject* frame) {
#if PY_VERSION_HEX >= 0x030B0000
    return reinterpret_cast<PyFrameObject*>(frame)->f_frame;
#else
    return reinterpret_cast<PyFrameObject*>(frame);
#endif
  }
#endif

 private:
  static constexpr size_t kMaxSites = 1 << 16;

  static const char* text(PyObject* unicode) {
    const char* utf8 = PyUnicode_AsUTF8(unicode);
    if (!utf8) PyErr_Clear();
    return utf8 ? utf8 : "?";
  }

  std::vector<std::string> skip_;
  Emit emit_ = nullptr;
  void* context_ = nullptr;
  std::unordered_map<std::string, uint32_t> ids_;
  std::atomic<uint64_t> ring_{0};  // counts reset()s: an id is of use for one ring
  std::atomic<uint64_t> gil_taken_{0};
#if RANKCALL_FRAMES
  CodeTable codes_;
  PyObject* current_frames_ = nullptr;
#endif
};

}  // namespace rankcall
