// The line that issued an op, from this thread's interpreter frames: no GIL, no wrappers, ~15 ns.
//
// A thread's own frames stand still while it is inside a C call, so they can be read without the
// GIL. The GIL is taken once per code object and line that has not been met. Needs no torch.
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

class GilGuard {
 public:
  GilGuard() : state_(PyGILState_Ensure()) {}
  ~GilGuard() { PyGILState_Release(state_); }
  GilGuard(const GilGuard&) = delete;
  GilGuard& operator=(const GilGuard&) = delete;

 private:
  PyGILState_STATE state_;
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

  // Start over for a new ring. Call with the GIL. `skip` are path prefixes of frames to pass over.
  void reset(std::vector<std::string> skip, Emit emit, void* context) {
    skip_ = std::move(skip);
    emit_ = emit;
    context_ = context;
    ids_.clear();
#if RANKCALL_FRAMES
    for (auto& entry : kinds_) clear(entry.code);
    for (auto& entry : sites_) {
      entry.version.fetch_add(1, std::memory_order_acq_rel);
      clear(entry.code), clear(entry.api);
      entry.version.fetch_add(1, std::memory_order_release);
    }
#endif
  }

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
      const Kind kind = kind_of(code);
      if (kind == kUser) {
        walk.user = code;
        walk.offset = offset_of(frame, code);
        return walk;
      }
      if (kind >= kApi) {
        walk.api = code;
        walk.api_frame = frame;
        walk.many = kind == kApiOfMany;
        walk.backward |= kind == kBackward;
      }
    }
    return walk;
  }

  // --- what a code object is, cached by address; the cache owns a reference, so none is reused ---
  struct KindEntry {
    std::atomic<PyCodeObject*> code{nullptr};
    std::atomic<uint8_t> kind{0};
  };

  Kind kind_of(PyCodeObject* code) {
    KindEntry& entry = kinds_[hash(code) % kEntries];
    if (entry.code.load(std::memory_order_acquire) == code) {
      const auto kind = static_cast<Kind>(entry.kind.load(std::memory_order_acquire));
      if (entry.code.load(std::memory_order_relaxed) == code) return kind;
    }
    GilGuard gil;
    const Kind kind = classify(code);
    clear(entry.code);
    entry.kind.store(kind, std::memory_order_release);
    Py_INCREF(code);
    entry.code.store(code, std::memory_order_release);
    return kind;
  }

  Kind classify(PyCodeObject* code) const {
    const std::string file = text(code->co_filename);
    const std::string name = text(code->co_name);
    if (file.rfind("<frozen ", 0) == 0 || file.rfind("<eval_with_key>", 0) == 0 ||
        file.find("/torchinductor_") != std::string::npos)
      return kHidden;
    // What stands between the user and torch's context managers and deprecated functions.
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

  // --- sites, cached by (code, instruction, api): a seqlock per entry, written with the GIL ---
  struct SiteEntry {
    std::atomic<uint32_t> version{0};
    std::atomic<uint32_t> id{0};
    std::atomic<PyCodeObject*> code{nullptr};
    std::atomic<PyCodeObject*> api{nullptr};
    std::atomic<intptr_t> offset{0};
  };

  uint32_t site_of(const Walk& walk) {
    SiteEntry& entry = sites_[(hash(walk.user) ^ hash(walk.api) ^ static_cast<size_t>(walk.offset) * 7) % kEntries];
    const uint32_t version = entry.version.load(std::memory_order_acquire);
    if (entry.code.load(std::memory_order_relaxed) == walk.user &&
        entry.api.load(std::memory_order_relaxed) == walk.api &&
        entry.offset.load(std::memory_order_relaxed) == walk.offset) {
      const uint32_t id = entry.id.load(std::memory_order_relaxed);
      std::atomic_thread_fence(std::memory_order_acquire);
      if (!(version & 1) && entry.version.load(std::memory_order_relaxed) == version) return id;
    }
    GilGuard gil;
    const uint32_t id = id_of(walk);
    entry.version.fetch_add(1, std::memory_order_acq_rel);
    clear(entry.code), clear(entry.api);
    Py_INCREF(walk.user);
    Py_XINCREF(walk.api);
    entry.code.store(walk.user, std::memory_order_relaxed);
    entry.api.store(walk.api, std::memory_order_relaxed);
    entry.offset.store(walk.offset, std::memory_order_relaxed);
    entry.id.store(id, std::memory_order_relaxed);
    entry.version.fetch_add(1, std::memory_order_release);
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
  uint32_t backward_site(uint64_t moment) {
    Thread& self = this_thread();
    if (moment == self.backward_moment) return self.backward_site;
    self.backward_moment = moment;
    self.backward_site = 0;
    GilGuard gil;
    for (PyThreadState* other = PyInterpreterState_ThreadHead(PyInterpreterState_Main()); other;
         other = PyThreadState_Next(other)) {
      const Walk walk = walk_from(top(other));
      if (walk.user && walk.backward) {
        self.backward_site = site_of(walk);
        break;
      }
    }
    return self.backward_site;
  }
#endif

 private:
  static constexpr size_t kEntries = 1024;
  static constexpr size_t kMaxSites = 1 << 16;

  static const char* text(PyObject* unicode) {
    const char* utf8 = PyUnicode_AsUTF8(unicode);
    if (!utf8) PyErr_Clear();
    return utf8 ? utf8 : "?";
  }
  static size_t hash(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) >> 5; }
  static void clear(std::atomic<PyCodeObject*>& slot) {
    PyCodeObject* old = slot.exchange(nullptr, std::memory_order_acq_rel);
    Py_XDECREF(old);
  }

  std::vector<std::string> skip_;
  Emit emit_ = nullptr;
  void* context_ = nullptr;
  std::unordered_map<std::string, uint32_t> ids_;
#if RANKCALL_FRAMES
  KindEntry kinds_[kEntries];
  SiteEntry sites_[kEntries];
#endif
};

}  // namespace rankcall
