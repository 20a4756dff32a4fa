// The line that issued an op, from this thread's interpreter frames: no GIL, no wrappers, ~15 ns.
//
// If that line is in a framework (an installed package, or Python's standard library), the walk goes
// on to the user's own line, some ns for each frame between the two: the same line of a framework,
// reached from two lines of the user's, is two call sites. No frame's address is kept, because the
// next call uses it again.
//
// A thread's own frames stand still while it is inside a C call, so they can be read without the
// GIL. The GIL is taken once for each new code object and line, which code_table.h remembers, and
// once a step by an autograd thread, which has no frames of its own. Needs no torch.
#pragma once

#include <Python.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "code_table.h"
#include "frames.h"
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

  // Start over for a new ring. Call with the GIL. `skip` are path prefixes of frames to pass over,
  // `installed` those of code that is not the user's own. They count for code objects that are met
  // from now on.
  void reset(std::vector<std::string> skip, std::vector<std::string> installed, Emit emit, void* context) {
    skip_ = std::move(skip);
    installed_ = std::move(installed);
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
    if (!walk.caller.code) return {backward_site(moment), false};
    return {site_of(walk), walk.many && continues(thread, walk.api_frame, walk.api)};
  }

 private:
  enum Kind : uint8_t { kUser, kFramework, kChild, kHidden, kWrapper, kApi, kApiOfMany, kBackward };

  struct Place {
    PyCodeObject* code = nullptr;
    Code* known = nullptr;  // its entry in codes_: null if there was no room
    intptr_t offset = 0;    // of the instruction, in bytes
  };
  struct Walk {
    Place caller;  // the nearest frame outside torch and rankcall
    Place user;    // the user's own frame behind it, if the caller is a framework
    PyCodeObject* api = nullptr;  // the outermost function of torch that is not a mere wrapper
    Code* api_known = nullptr;
    Frame api_frame = nullptr;
    bool many = false;    // the api issues several ops in one call
    bool backward = false;
  };

  Walk walk_from(Frame frame) {
    Walk walk;
    // Python's own limit on recursion: without one, a program that raised that limit would pay for all
    // its frames at each op.
    for (int depth = 0; frame && depth < 1000; frame = back(frame), depth++) {
      if (is_shim(frame)) continue;
      PyCodeObject* code = code_of(frame);
      Code* known = codes_.find(code);
      const Kind kind = known ? static_cast<Kind>(known->kind) : learn(code, known);
      if (kind <= kChild) {
        walk.caller = {code, known, offset_of(frame, code)};
        if (kind == kFramework) walk.user = user_behind(back(frame));
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

  // The user's own frame behind one of a framework. Gives up at code that there is no room to
  // remember: otherwise each op would take the GIL once for each such frame.
  Place user_behind(Frame frame) {
    for (int depth = 0; frame && depth < kMostFrames; frame = back(frame), depth++) {
      if (is_shim(frame)) continue;
      PyCodeObject* code = code_of(frame);
      Code* known = codes_.find(code);
      const Kind kind = known ? static_cast<Kind>(known->kind) : learn(code, known);
      if (!known || kind == kChild) break;
      if (kind == kUser) return {code, known, offset_of(frame, code)};
    }
    return {};
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
    if (!ours) return kind_outside(file, name);
    static const std::unordered_set<std::string> wrappers = {
        "wrapper", "inner", "wrapped", "_wrapped_call_impl", "_call_impl", "decorate_context", "_fn"};
    if (name == "_engine_run_backward") return kBackward;
    if (wrappers.count(name) || file.find("c10d_logger.py") != std::string::npos) return kWrapper;
    if (name == "batch_isend_irecv" || name.find("object") != std::string::npos) return kApiOfMany;
    return kApi;
  }

  // Code outside torch and rankcall: the user's own, or installed. Text in angle brackets stands for a
  // missing file. It is the user's if the program came on the command line or was typed, and not if
  // a package generated it.
  Kind kind_outside(const std::string& file, const std::string& name) const {
    // A child of multiprocessing's begins here; multiprocessing wrote its first line.
    if (name == "spawn_main" && file.find("/multiprocessing/") != std::string::npos) return kChild;
    if (name == "main" && file.find("/multiprocessing/forkserver.py") != std::string::npos) return kChild;
    if (file.find("/site-packages/") != std::string::npos || file.find("/dist-packages/") != std::string::npos)
      return kFramework;
    for (const auto& prefix : installed_)
      if (file.compare(0, prefix.size(), prefix) == 0) return kFramework;
    if (file[0] != '<') return kUser;
    for (const std::string typed : {"<string>", "<stdin>", "<python-input", "<ipython-input"})
      if (file.rfind(typed, 0) == 0) return kUser;
    return kFramework;
  }

  // The side-table id of a line, and of the user's own line behind it. It is remembered with the
  // user's line, together with the number of the ring that it is for.
  uint32_t site_of(const Walk& walk) {
    const uint64_t ring = ring_.load(std::memory_order_acquire);
    Code* known = walk.api_known || !walk.api ? walk.caller.known : nullptr;
    uint64_t key = key_of(walk.caller, walk.api_known ? walk.api_known->serial : CodeTable::kNoSerial);
    if (known && walk.user.code) {
      const uint64_t number = number_of(walk, key | kOfFramework);
      known = number ? walk.user.known : nullptr;
      key = key_of(walk.user, number) | kOfFramework;
    }
    if (known) {
      const auto* line = known->line(key);
      const uint64_t value = line ? line->load(std::memory_order_acquire) : 0;
      if (value >> 32 == ring) return static_cast<uint32_t>(value);
    }
    GilGuard gil;
    if (!gil.held()) return 0;
    gil_taken_.fetch_add(1, std::memory_order_relaxed);
    const uint32_t id = id_of(walk);
    if (known) codes_.remember(*known, key, ring << 32 | id);
    return id;
  }

  // In the key of a line: it is part of a pair, a line of a framework and the user's line behind it.
  static constexpr uint64_t kOfFramework = uint64_t{1} << 63;

  static uint64_t key_of(const Place& place, uint64_t serial) {
    return (static_cast<uint64_t>(place.offset) << 32 & ~kOfFramework) | serial;
  }

  // A number that stands for a framework's line and the public function in the keys of the user's
  // lines; 0 if there is no room for another one. Two code objects made of the same source have the
  // same numbers, so code that is made anew at each step does not fill the tables.
  uint64_t number_of(const Walk& walk, uint64_t key) {
    Code& code = *walk.caller.known;
    const auto* line = code.line(key);
    if (line) return line->load(std::memory_order_acquire);
    GilGuard gil;
    if (!gil.held()) return 0;
    gil_taken_.fetch_add(1, std::memory_order_relaxed);
    if (numbers_.size() >= kMaxSites) return 0;
    const uint64_t number = numbers_.emplace(caller_json(walk), numbers_.size() + 1).first->second;
    codes_.remember(code, key, number);
    return number;
  }

  uint32_t id_of(const Walk& walk) {
    std::string json = "{" + caller_json(walk);
    if (walk.user.code) json += ", \"user\": {" + json_of(walk.user) + "}";
    json += "}";
    auto known = ids_.find(json);
    if (known != ids_.end()) return known->second;
    if (ids_.size() >= kMaxSites) return 0;
    const std::string file = json_text(text(walk.caller.code->co_filename));
    const std::string source = file.substr(0, file.size() - 1) + ":" + std::to_string(line_of(walk.caller)) + "\"";
    const uint32_t id = emit_(context_, json, source, api_of(walk));
    return ids_[std::move(json)] = id;
  }
  static int line_of(const Place& place) {
    const int line = PyCode_Addr2Line(place.code, static_cast<int>(place.offset));
    return line > 0 ? line : place.code->co_firstlineno;
  }
  // The name of the public function; of all that a Join issues, that of the class.
  static const char* api_of(const Walk& walk) {
    if (!walk.api) return "";
    const std::string file = text(walk.api->co_filename);
    for (const std::string place : {"/rankcall/join/", "/torch/distributed/algorithms/join.py"})
      if (file.find(place) != std::string::npos) return "Join";
    return text(walk.api->co_name);
  }
  static std::string json_of(const Place& place) {
    return "\"file\": " + json_text(text(place.code->co_filename)) + ", \"line\": " +
           std::to_string(line_of(place)) + ", \"function\": " + json_text(text(place.code->co_name));
  }
  static std::string caller_json(const Walk& walk) {
    return json_of(walk.caller) + ", \"api\": " + json_text(api_of(walk));
  }

  // Which ops belong to one call of a function that issues several.
  // A frame's address is used again by the next call. A new frame has no frame object, so one is
  // made at the first op of a call: it marks the frame for as long as the call lasts. Others make
  // frame objects too: who looks at a thread's stack, or a warning. A call that such a one marks
  // before its first op is another function's, or begins further up than the last call ended.
  static bool continues(PyThreadState* thread, Frame frame, PyCodeObject* code) {
    Thread& self = this_thread();
    const intptr_t offset = offset_of(frame, code);
    const bool same = frame == self.call_frame && is_marked(frame) && code == self.call_code &&
                      offset >= self.call_offset;
    self.call_frame = frame;
    self.call_code = code;
    self.call_offset = offset;
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

  // Ops that autograd's threads for devices issue, which have no Python frames of their own.
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
      if (walk.caller.code && walk.backward) {
        self.backward_site = site_of(walk);
        break;
      }
    }
    if (!frames) PyErr_Clear();
    Py_XDECREF(frames);
    return self.backward_site;
  }
#endif

 private:
  // A program that makes code without end must not make the tables grow without end.
  static constexpr size_t kMaxSites = 1 << 16;
  // Between a framework's line and the user's. Lightning has some 30; deeper is a recursion.
  static constexpr int kMostFrames = 400;

  std::vector<std::string> skip_, installed_;
  Emit emit_ = nullptr;
  void* context_ = nullptr;
  std::unordered_map<std::string, uint32_t> ids_;
  std::unordered_map<std::string, uint64_t> numbers_;  // of a framework's lines
  std::atomic<uint64_t> ring_{0};  // counts reset()s: an id is of use for one ring
  std::atomic<uint64_t> gil_taken_{0};
#if RANKCALL_FRAMES
  CodeTable codes_;
  PyObject* current_frames_ = nullptr;
#endif
};

}  // namespace rankcall
