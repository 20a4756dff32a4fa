// The native recorder: one boxed kernel in front of every c10d op writes a record into the ring.
//
// BackendSelect is in every tensor's default key set, so no mode, guard or subclass goes around it.
// A kernel never throws of its own accord, keeps no tensor, takes no lock across Python, and does
// not wait. Rings are closed by a bit in their head counter and outlive the last op in flight.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>
#include <typeindex>
#include <unordered_set>
#include <vector>

#include "callsite.h"
#include "device.h"
#include "groups.h"
#include "layout.h"
#include "marks.h"
#include "ops.h"
#include "ring.h"
#include "statuses.h"
#include "thread.h"

namespace rankcall {
namespace {

constexpr size_t kMaxOps = 64;

CallSites g_call_sites;

// Wakes the hook dispatcher, which sleeps on an eventfd. 0: awake or absent, 1: wants ends, 2: both.
std::atomic<int> g_sleeping{0};
std::atomic<int> g_wake_fd{-1};

void wake(int least) noexcept {
  if (g_sleeping.load() < least) return;
  if (g_sleeping.exchange(0) == 0) return;
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = write(g_wake_fd.load(), &one, sizeof(one));
}

// Kinds of Work whose getFuture() throws, which costs 6 to 16 us each time: asked once.
class Futureless {
 public:
  bool knows(const std::type_info& type) const {
    for (const auto& slot : types_) {
      const std::type_info* known = slot.load(std::memory_order_acquire);
      if (!known) return false;
      if (known == &type) return true;
    }
    return false;
  }
  void add(const std::type_info& type) {
    for (auto& slot : types_) {
      const std::type_info* expected = nullptr;
      if (slot.compare_exchange_strong(expected, &type) || expected == &type) return;
    }
  }

 private:
  std::atomic<const std::type_info*> types_[32] = {};
};
Futureless g_futureless;

class Recorder {
 public:
  Recorder(char* base, const Geometry& geometry)
      : ring(base, geometry), groups(ring), devices(ring), marks(geometry.capacity) {
    ring.tell([](void* told, uint64_t index) { static_cast<Marks*>(told)->ended(index); }, &marks);
  }

  Ring ring;
  Groups groups;
  DeviceTimes devices;
  Marks marks;
  Op ops[kMaxOps];
  uint8_t dtypes[256] = {};
  bool call_sites = true;

  void run() {
    thread_ = std::thread([this] { beat(); });
    pthread_setname_np(thread_.native_handle(), "rankcall");
  }
  void stop() {
    ring.close();
    ring.note_closed_head();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }
  // Write down how many elements each tensor of a coalesced op has, once per shape hash.
  void note_shapes(uint32_t hash, const c10::IValue& tensors) {
    {
      std::lock_guard<std::mutex> lock(shapes_mutex_);
      if (shapes_.size() >= kMaxShapes || !shapes_.insert(hash).second) return;
    }
    std::string json = "{\"hash\": " + std::to_string(hash) + ", \"numels\": [";
    std::vector<int64_t> numels;
    each_tensor(tensors, [&](const at::Tensor& tensor) {
      if (numels.size() == kMaxNumels) return;
      json += (numels.empty() ? "" : ", ") + std::to_string(tensor.numel());
      numels.push_back(tensor.numel());
    });
    ring.append(layout::kEntrySizes, json + "]}");
    marks.add_numels(hash, std::move(numels));
  }
  // An op on a device is outstanding: poll it soon.
  void device_busy() {
    if (!polling_.exchange(true)) {
      std::lock_guard<std::mutex> lock(mutex_);
      changed_.notify_one();
    }
  }

 private:
  void beat() {
    std::unique_lock<std::mutex> lock(mutex_);
    int64_t beaten = 0;
    while (!stopping_) {
      const int64_t now = now_ns();
      if (now - beaten > 400'000'000) {
        beaten = now;
        ring.field<int64_t>(layout::kNativeHeartbeat).store(now, std::memory_order_relaxed);
      }
      polling_ = false;
      lock.unlock();
      const bool outstanding = devices.poll();
      if (outstanding) wake(1);
      lock.lock();
      if (outstanding) polling_ = true;
      if (stopping_) break;
      changed_.wait_for(lock, outstanding ? std::chrono::milliseconds(1) : std::chrono::milliseconds(500));
    }
  }

  static constexpr size_t kMaxShapes = 1024, kMaxNumels = 1024;
  std::mutex shapes_mutex_;
  std::unordered_set<uint32_t> shapes_;
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::atomic<bool> polling_{false};
};

std::atomic<Recorder*> g_active{nullptr};

struct Issued {
  Recorder* recorder = nullptr;
  uint64_t index = 0;
  Group* group = nullptr;
  DeviceTimes::Span* span = nullptr;
  bool any_source = false;
  int64_t tag = 0;
};

void finish(Recorder& recorder, uint64_t index, const Outcome& outcome) noexcept {
  recorder.ring.finish(index, outcome);
  wake(1);
}

Outcome failure(Recorder& recorder, const char* message) noexcept {
  Outcome outcome{layout::kFailed, now_ns()};
  try {
    outcome.error = recorder.ring.error(message);
  } catch (...) {
  }
  return outcome;
}

void fill_shape(Recorder& recorder, Record& record, const c10::IValue* tensors, const Op& op, const c10::IValue* arguments,
                const Sizes& sizes) {
  record.tensors = static_cast<uint16_t>(std::min<uint32_t>(sizes.tensors, UINT16_MAX));
  if (sizes.first && !sizes.first->is_sparse()) {
    const auto dims = sizes.first->unsafeGetTensorImpl()->sizes();
    record.ndim = static_cast<uint8_t>(std::min<size_t>(dims.size(), layout::kMaxDims));
    for (size_t i = 0; i < record.ndim; i++) record.shape[i] = dims[i];
  }
  const bool splits = op.in_splits >= 0 && (!arguments[op.in_splits].toListRef().empty() ||
                                            !arguments[op.out_splits].toListRef().empty());
  if (sizes.tensors < 2 && !splits) return;
  Hash hash;
  each_tensor(*tensors, [&](const at::Tensor& tensor) {
    const auto dims = tensor.sizes();
    hash.add(static_cast<int64_t>(dims.size()));
    for (int64_t dim : dims) hash.add(dim);
  });
  if (splits) {
    for (const int list : {op.out_splits, op.in_splits}) {
      hash.add(-1);
      for (const c10::IValue& split : arguments[list].toListRef()) hash.add(split.toInt());
    }
  }
  record.shape_hash = hash.folded();
  if (op.coalesced) recorder.note_shapes(record.shape_hash, *tensors);
}

// Read what the arguments say.
void read_arguments(Recorder& recorder, const Op& op, const c10::IValue* arguments, Record& record, Issued& issued,
                    c10::Device& device) {
  const auto at = [&](int position) { return position >= 0 ? &arguments[position] : nullptr; };
  const c10::IValue* in_value = at(op.input >= 0 ? op.input : op.code == layout::kRecv ? -1 : op.in_place);
  const c10::IValue* out_value = at(op.output >= 0 ? op.output : op.code == layout::kSend ? -1 : op.in_place);
  const Sizes in = sizes_of(in_value);
  const Sizes out = out_value == in_value ? in : sizes_of(out_value);
  const Sizes other = sizes_of(at(op.other_tensor));
  const Sizes& main = in.first ? in : out.first ? out : other;

  issued.group = recorder.groups.find(held<c10d::ProcessGroup>(arguments[op.process_group]));
  record.group = issued.group->id;
  record.in_bytes = in.bytes;
  record.out_bytes = out.bytes;
  record.message_bytes = message_bytes(op, arguments, in, out, issued.group->rank, issued.group->size);
  if (main.first) {
    device = main.first->device();
    record.dtype = recorder.dtypes[static_cast<uint8_t>(main.first->scalar_type())];
  }
  if (&main != &other) fill_shape(recorder, record, in.first ? in_value : out_value, op, arguments, main);
  record.device_type = static_cast<uint8_t>(device.type());
  record.device_index = device.index();
  record.root = op.root >= 0 ? static_cast<int32_t>(arguments[op.root].toInt()) : -1;
  record.tag = op.tag >= 0 ? arguments[op.tag].toInt() : 0;
  record.peer = -1;
  record.async_op = op.async_op >= 0 ? arguments[op.async_op].toBool() : 2;
  if (op.reduce_op >= 0) {
    const auto* reduce = held<c10d::ReduceOp>(arguments[op.reduce_op]);
    const int code = static_cast<int>(static_cast<c10d::ReduceOp::RedOpType>(*reduce)) + 1;
    record.reduce_op = static_cast<uint8_t>(code < static_cast<int>(layout::kReduceOps) ? code : 0);
  }
  if (op.p2p) {
    record.kind = layout::kP2p;
    const bool outgoing = op.dst >= 0;
    const int peer_at = outgoing ? op.dst : op.src;
    if (peer_at >= 0) {
      record.peer = static_cast<int32_t>(arguments[peer_at].toInt());
      record.seq = issued.group->next_p2p(record.peer, record.tag, outgoing);
    } else {
      issued.any_source = true;
      issued.tag = record.tag;
      record.flags |= layout::kFlagAnySource;
    }
  } else {
    record.seq = issued.group->collectives.fetch_add(1, std::memory_order_relaxed) + 1;
  }
}

void fill_call_site(Recorder& recorder, Record& record, uint64_t index) {
  uint64_t& correlation = this_thread().correlation;
  CallSites::Found found;
  if (recorder.call_sites) found = g_call_sites.find(record.step);
  if (!found.continues) correlation = index + 1;
  record.call_site = found.site;
  record.correlation = correlation;
}

void write_record(Recorder& recorder, const Op& op, Record& record, Issued& issued, c10::Device device) {
  fill_call_site(recorder, record, issued.index);
  if (!device.is_cpu()) issued.span = recorder.devices.begin(device);
  if (issued.span) {
    issued.span->index = issued.index;
    record.flags |= layout::kFlagDevice;
    record.status = layout::kEnqueued;
  } else {
    record.status = layout::kStarted;
  }
  record.enqueued_ns = now_ns();
  if (!issued.span) record.started_ns = record.enqueued_ns;
  if (Record* slot = recorder.ring.begin(issued.index)) {
    constexpr size_t kBody = offsetof(Record, seq);
    std::memcpy(reinterpret_cast<char*>(slot) + kBody, reinterpret_cast<char*>(&record) + kBody,
                sizeof(Record) - kBody);
    recorder.ring.publish(slot, issued.index);
    wake(2);
  }
  if (recorder.marks.on()) {
    const int32_t rank = recorder.ring.field<int32_t>(layout::kRank).load(std::memory_order_relaxed);
    recorder.marks.issued(record, issued.index, op.name, rank);
  }
}

// Record that an op is issued. False where it is not to be recorded, or recording is off.
bool begin(size_t which, const torch::jit::Stack& stack, Issued& issued) noexcept {
  Recorder* recorder = g_active.load(std::memory_order_acquire);
  if (!recorder) return false;
  try {
    const Op& op = recorder->ops[which];
    const c10::IValue* arguments = &*(stack.end() - static_cast<std::ptrdiff_t>(op.arguments));
    Record record{};
    c10::Device device(c10::kCPU);
    read_arguments(*recorder, op, arguments, record, issued, device);
    record.op = op.code;
    record.variant = op.variant;
    record.thread = this_thread().thread_id();
    record.step = recorder->ring.field<uint64_t>(layout::kStep).load(std::memory_order_relaxed);
    record.device_ms = std::nan("");
    if (!recorder->ring.reserve(issued.index)) return false;
    issued.recorder = recorder;
    write_record(*recorder, op, record, issued, device);
  } catch (...) {
    // An argument nobody foresaw: the user's op goes on. An index that was taken is still finished.
  }
  return issued.recorder != nullptr;
}

// The end of an op whose Work tells it. On a device that end is still to come: its event is watched.
void ended(Recorder& recorder, uint64_t index, DeviceTimes::Span* span, const Outcome& outcome) noexcept {
  if (span && recorder.devices.end(span, outcome)) recorder.device_busy();
  else finish(recorder, index, outcome);
}

Outcome outcome_of(Recorder& recorder, c10::ivalue::Future& future) noexcept {
  if (!future.hasError()) return Outcome{layout::kCompleted, now_ns()};
  try {
    return failure(recorder, future.tryRetrieveErrorMessage().c_str());
  } catch (...) {
    return failure(recorder, "unknown error");
  }
}

// Stands in for a Work that has no future: the return of wait() is the end of the op.
class WaitedWork final : public c10d::Work {
 public:
  WaitedWork(c10::intrusive_ptr<c10d::Work> inner, const Issued& issued)
      : c10d::Work(-1, inner->retrieveOpType()), inner_(std::move(inner)), issued_(issued) {}
  ~WaitedWork() override {
    if (over_.exchange(true)) return;
    Outcome outcome{layout::kStarted, 0};
    outcome.abandoned = true;
    ended(*issued_.recorder, issued_.index, issued_.span, outcome);
  }

  bool wait(std::chrono::milliseconds timeout) override {
    bool result;
    try {
      result = inner_->wait(timeout);
    } catch (const std::exception& error) {
      over(failure(*issued_.recorder, error.what()));
      throw;
    }
    over(Outcome{layout::kCompleted, now_ns()});
    // Functional collectives keep works in a registry, under the pointer they were given.
    c10d::unregister_work(c10::intrusive_ptr<c10d::Work>::unsafe_reclaim_from_nonowning(this));
    return result;
  }
  bool isCompleted() override {
    const bool completed = inner_->isCompleted();
    if (completed) over(inner_->exception() ? failure(*issued_.recorder, "failed") : Outcome{layout::kCompleted, now_ns()});
    return completed;
  }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void synchronize() override { inner_->synchronize(); }
  void blockCurrentStream() override { inner_->blockCurrentStream(); }
  void abort() override { inner_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return inner_->getFuture(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override { return inner_->getFutureResult(); }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }

 private:
  void over(Outcome outcome) noexcept {
    if (over_.exchange(true)) return;
    if (issued_.any_source && outcome.status == layout::kCompleted) {
      try {
        outcome.peer = inner_->sourceRank();
        outcome.seq = issued_.group->next_p2p(outcome.peer, issued_.tag, false);
      } catch (...) {
      }
    }
    ended(*issued_.recorder, issued_.index, issued_.span, outcome);
  }

  c10::intrusive_ptr<c10d::Work> inner_;
  Issued issued_;
  std::atomic<bool> over_{false};
};

void follow_future(const Issued& issued, const c10::intrusive_ptr<c10::ivalue::Future>& future) {
  Recorder* recorder = issued.recorder;
  if (issued.span) {
    // With uses_future the callback runs on streams that wait for the op, so the event it records
    // comes after the op's end.
    future->addCallback([recorder, span = issued.span](c10::ivalue::Future& done) {
      ended(*recorder, span->index, span, outcome_of(*recorder, done));
    });
  } else if (future->completed()) {
    finish(*recorder, issued.index, outcome_of(*recorder, *future));
  } else {
    // Two words of capture: std::function keeps them without allocating.
    future->addCallback(
        [recorder, index = issued.index](c10::ivalue::Future& done) {
          finish(*recorder, index, outcome_of(*recorder, done));
        },
        /*uses_future=*/false);
  }
}

// Arrange for the end to be recorded, after the op has been issued.
void follow(const Op& op, torch::jit::Stack& stack, const Issued& issued) {
  Recorder& recorder = *issued.recorder;
  c10d::Work* work = nullptr;
  if (op.returns_work && stack.back().isObject()) work = held<c10d::Work>(stack.back());
  if (!work) {  // monitored_barrier_, and what a back end merges into a later launch
    ended(recorder, issued.index, issued.span, Outcome{layout::kCompleted, now_ns()});
    return;
  }
  const std::type_info& type = typeid(*work);
  if (!g_futureless.knows(type)) {
    c10::intrusive_ptr<c10::ivalue::Future> future;
    try {
      future = work->getFuture();
    } catch (const std::exception&) {
    }
    if (future) {
      follow_future(issued, future);
      return;
    }
    g_futureless.add(type);
  }
  auto inner = c10::intrusive_ptr<c10d::Work>::unsafe_reclaim_from_nonowning(work);
  stack.back() = c10::IValue(c10::intrusive_ptr<c10d::Work>(c10::make_intrusive<WaitedWork>(std::move(inner), issued)));
}

template <size_t Which>
void kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto next = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
  Issued issued;
  // Meta and fake tensors: a compiler traces with them, and the op will not run.
  const bool traced = keys.has_backend(c10::BackendComponent::MetaBit);
  if (traced || !begin(Which, *stack, issued)) {
    op.redispatchBoxed(next, stack);
    return;
  }
  try {
    op.redispatchBoxed(next, stack);
  } catch (const std::exception& error) {
    finish(*issued.recorder, issued.index, failure(*issued.recorder, error.what()));
    throw;
  } catch (...) {
    finish(*issued.recorder, issued.index, failure(*issued.recorder, "unknown error"));
    throw;
  }
  follow(issued.recorder->ops[Which], *stack, issued);
}

// --- installing the kernels ---

std::vector<std::string> g_names;  // of the ops, in the order of the kernels
std::unique_ptr<torch::Library> g_library;

template <size_t Which = 0>
void install(torch::Library& library) {
  if constexpr (Which < kMaxOps) {
    if (Which >= g_names.size()) return;
    library.impl(g_names[Which].c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel<Which>>());
    install<Which + 1>(library);
  }
}

std::vector<c10::OperatorHandle> c10d_ops() {
  std::vector<c10::OperatorHandle> found;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("c10d::", 0) != 0) continue;
    const auto handle = dispatcher.findSchema(name);
    Op op;
    if (handle && describe(handle->schema(), op) && found.size() < kMaxOps) found.push_back(*handle);
  }
  return found;
}

void in_forked_child() {
  g_active.store(nullptr);
  g_sleeping.store(0);
  this_thread().id = 0;
}

// --- the Python module ---

PyObject* fail(const std::exception& error) {
  PyErr_SetString(PyExc_RuntimeError, error.what());
  return nullptr;
}

PyObject* py_ops(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  for (const auto& handle : c10d_ops()) {
    PyObject* name = PyUnicode_FromString(handle.schema().name().substr(6).c_str());
    PyList_Append(names, name);
    Py_DECREF(name);
  }
  return names;
}

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

PyObject* py_create(PyObject*, PyObject* args) {
  Py_buffer buffer;
  Geometry geometry;
  PyObject *dtypes, *skip;
  int call_sites;
  if (!PyArg_ParseTuple(args, "w*(KKKKKK)OOp", &buffer, &geometry.capacity, &geometry.inflight_capacity,
                        &geometry.tables_bytes, &geometry.inflight_offset, &geometry.tables_offset,
                        &geometry.records_offset, &dtypes, &skip, &call_sites))
    return nullptr;
  auto* holder = new Holder;
  holder->buffer = buffer;
  holder->recorder = new Recorder(static_cast<char*>(buffer.buf), geometry);
  Recorder& recorder = *holder->recorder;
  recorder.call_sites = call_sites != 0 && RANKCALL_FRAMES;
  for (Py_ssize_t i = 0; i < PySequence_Size(dtypes); i++) {
    PyObject* pair = PySequence_GetItem(dtypes, i);
    PyObject* dtype = PyTuple_GetItem(pair, 0);
    if (THPDtype_Check(dtype))
      recorder.dtypes[static_cast<uint8_t>(reinterpret_cast<THPDtype*>(dtype)->scalar_type)] =
          static_cast<uint8_t>(PyLong_AsLong(PyTuple_GetItem(pair, 1)));
    Py_DECREF(pair);
  }
  std::vector<std::string> prefixes;
  for (Py_ssize_t i = 0; i < PySequence_Size(skip); i++) {
    PyObject* prefix = PySequence_GetItem(skip, i);
    prefixes.emplace_back(PyUnicode_AsUTF8(prefix));
    Py_DECREF(prefix);
  }
  g_call_sites.reset(std::move(prefixes),
                     [](void* context, const std::string& entry, const std::string& source, const char* api) {
                       auto* to = static_cast<Recorder*>(context);
                       const uint32_t id = to->ring.append(layout::kEntrySite, entry);
                       to->marks.add_site(id, source, api);
                       return id;
                     },
                     &recorder);
  return PyCapsule_New(holder, "rankcall.recorder", release_holder);
}

PyObject* py_start(PyObject*, PyObject* args) {
  PyObject *capsule, *codes;
  if (!PyArg_ParseTuple(args, "OO", &capsule, &codes)) return nullptr;
  Recorder& recorder = *holder_of(capsule)->recorder;
  try {
    g_names.clear();
    for (const auto& handle : c10d_ops()) {
      Op op;
      op.name = handle.schema().name().substr(6);
      PyObject* code = PyDict_GetItemString(codes, op.name.c_str());
      op.code = code ? static_cast<uint8_t>(PyLong_AsLong(code)) : 0;
      describe(handle.schema(), op);
      op.variant = recorder.ring.append(layout::kEntryString, op.name);
      g_names.push_back(op.name);
      recorder.ops[g_names.size() - 1] = op;
    }
    recorder.run();
    g_active.store(&recorder, std::memory_order_release);
    g_library = std::make_unique<torch::Library>(torch::Library::IMPL, "c10d", c10::DispatchKey::BackendSelect,
                                                 __FILE__, __LINE__);
    install(*g_library);
  } catch (const std::exception& error) {
    g_active.store(nullptr);
    return fail(error);
  }
  Py_RETURN_NONE;
}

// Stop recording. Ops in flight still write their ends; drained() tells when the last has.
PyObject* py_stop(PyObject*, PyObject* capsule) {
  Recorder& recorder = *holder_of(capsule)->recorder;
  g_active.store(nullptr, std::memory_order_release);
  g_library.reset();
  Py_BEGIN_ALLOW_THREADS
  recorder.stop();
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

PyObject* py_drained(PyObject*, PyObject* capsule) {
  return PyBool_FromLong(holder_of(capsule)->recorder->ring.drained());
}

PyObject* py_append(PyObject*, PyObject* args) {
  PyObject* capsule;
  unsigned int kind;
  const char* payload;
  Py_ssize_t size;
  if (!PyArg_ParseTuple(args, "OIy#", &capsule, &kind, &payload, &size)) return nullptr;
  return PyLong_FromUnsignedLong(holder_of(capsule)->recorder->ring.append(kind, std::string(payload, size)));
}

PyObject* py_add_group(PyObject*, PyObject* args) {
  PyObject* capsule;
  const char *name, *payload;
  Py_ssize_t size;
  if (!PyArg_ParseTuple(args, "Osy#", &capsule, &name, &payload, &size)) return nullptr;
  return PyLong_FromUnsignedLong(holder_of(capsule)->recorder->groups.announce(name, std::string(payload, size)));
}

std::vector<std::string> texts_of(PyObject* list) {
  std::vector<std::string> texts;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) texts.emplace_back(PyUnicode_AsUTF8(PyList_GET_ITEM(list, i)));
  return texts;
}

// Have a tool told of each op as it is issued, by C functions at these addresses.
PyObject* py_marks(PyObject*, PyObject* args) {
  PyObject *capsule, *dtypes, *variants, *names, *calls;
  unsigned long long mark, begin, end;
  const char *about, *batch;
  int pickles, across_only;
  if (!PyArg_ParseTuple(args, "O(KKK)sO!O!O!O!sip", &capsule, &mark, &begin, &end, &about, &PyList_Type, &dtypes,
                        &PyList_Type, &variants, &PyList_Type, &names, &PyList_Type, &calls, &batch, &pickles,
                        &across_only))
    return nullptr;
  Marks::Functions functions;
  functions.mark = reinterpret_cast<decltype(functions.mark)>(mark);
  functions.begin = reinterpret_cast<decltype(functions.begin)>(begin);
  functions.end = reinterpret_cast<decltype(functions.end)>(end);
  Marks::Settings settings;
  settings.about = about;
  settings.dtypes = texts_of(dtypes);
  const auto ops = texts_of(variants), called = texts_of(names);
  for (size_t i = 0; i < ops.size() && i < called.size(); i++) settings.names[ops[i]] = called[i];
  for (const auto& call : texts_of(calls)) settings.object_calls.insert(call);
  settings.batch = batch;
  settings.pickles = static_cast<uint8_t>(pickles);
  settings.across_only = across_only != 0;
  holder_of(capsule)->recorder->marks.turn_on(functions, std::move(settings));
  Py_RETURN_NONE;
}

PyObject* py_marks_off(PyObject*, PyObject* capsule) {
  holder_of(capsule)->recorder->marks.turn_off();
  Py_RETURN_NONE;
}

// What marks say of a group: JSON of its label and ranks, the ranks, and this rank's place.
PyObject* py_group_text(PyObject*, PyObject* args) {
  PyObject *capsule, *ranks;
  unsigned int id;
  const char *label, *text;
  Marks::GroupText group;
  if (!PyArg_ParseTuple(args, "OIssO!i", &capsule, &id, &label, &text, &PyList_Type, &ranks, &group.me)) return nullptr;
  group.label = label;
  group.ranks_text = text;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(ranks); i++)
    group.ranks.push_back(static_cast<int32_t>(PyLong_AsLong(PyList_GET_ITEM(ranks, i))));
  holder_of(capsule)->recorder->marks.add_group(id, std::move(group));
  Py_RETURN_NONE;
}

// Whether a group crosses hosts, and a byte a member: whether it is on another.
PyObject* py_group_span(PyObject*, PyObject* args) {
  PyObject* capsule;
  unsigned int id;
  int crosses;
  const char* elsewhere;
  Py_ssize_t size;
  if (!PyArg_ParseTuple(args, "OIpy#", &capsule, &id, &crosses, &elsewhere, &size)) return nullptr;
  holder_of(capsule)->recorder->marks.set_span(id, crosses != 0, std::string(elsewhere, static_cast<size_t>(size)));
  Py_RETURN_NONE;
}

PyObject* py_counts(PyObject*, PyObject* capsule) {
  const Ring& ring = holder_of(capsule)->recorder->ring;
  const uint64_t done = ring.done();
  return Py_BuildValue("KK", static_cast<unsigned long long>(ring.head()), static_cast<unsigned long long>(done));
}

PyObject* py_step(PyObject*, PyObject* capsule) {
  holder_of(capsule)->recorder->ring.field<uint64_t>(layout::kStep).fetch_add(1, std::memory_order_relaxed);
  Py_RETURN_NONE;
}

// Say that the dispatcher is about to sleep on `fd`, and what it wants to be woken for.
PyObject* py_sleep(PyObject*, PyObject* args) {
  int fd, mode;
  if (!PyArg_ParseTuple(args, "ii", &fd, &mode)) return nullptr;
  g_wake_fd.store(fd);
  g_sleeping.store(mode);
  Py_RETURN_NONE;
}

PyObject* py_find_call_site(PyObject*, PyObject* moment) {
  // For tests: what the walk finds here and now.
  CallSites::Found found;
  const uint64_t value = PyLong_AsUnsignedLongLong(moment);
  Py_BEGIN_ALLOW_THREADS
  found = g_call_sites.find(value);
  Py_END_ALLOW_THREADS
  return PyLong_FromUnsignedLong(found.site);
}

PyMethodDef g_methods[] = {
    {"ops", py_ops, METH_NOARGS, "Names of the c10d ops that can be recorded."},
    {"create", py_create, METH_VARARGS, "Make a recorder over a writable ring buffer."},
    {"start", py_start, METH_VARARGS, "Install the kernels and record."},
    {"stop", py_stop, METH_O, "Take the kernels out; ops in flight still finish."},
    {"drained", py_drained, METH_O, "Whether a stopped recorder's last op has finished."},
    {"append", py_append, METH_VARARGS, "Add a side-table entry; returns its id or 0."},
    {"add_group", py_add_group, METH_VARARGS, "Announce a process group by name."},
    {"marks", py_marks, METH_VARARGS, "Have a tool told of each op as it is issued."},
    {"marks_off", py_marks_off, METH_O, "Tell it no more."},
    {"group_text", py_group_text, METH_VARARGS, "What marks say of a group."},
    {"group_span", py_group_span, METH_VARARGS, "Which members of a group are on other hosts."},
    {"counts", py_counts, METH_O, "Records issued and finished."},
    {"step", py_step, METH_O, "Count an optimizer step."},
    {"sleep", py_sleep, METH_VARARGS, "Arm the wake-up of the hook dispatcher."},
    {"statuses", make_statuses, METH_VARARGS, "What hooks get of a batch of events."},
    {"find_call_site", py_find_call_site, METH_O, "The call-site id of the caller."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef g_module = {PyModuleDef_HEAD_INIT, "rankcall_recorder", nullptr, -1, g_methods,
                        nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace rankcall

PyMODINIT_FUNC PyInit_rankcall_recorder() {
  pthread_atfork(nullptr, nullptr, rankcall::in_forked_child);
  PyObject* module = PyModule_Create(&rankcall::g_module);
  if (module) PyModule_AddIntConstant(module, "CALL_SITES", RANKCALL_FRAMES);
  return module;
}
