// Device times without a device: a guard for PrivateUse1 whose events follow a clock we set.
//
// An event recorded on a stream completes when that stream is done with what was put on it before;
// `work(ms)` puts work on the current stream. Host time is the real monotonic clock plus nothing:
// the probe only compares what DeviceTimes wrote with when the fake device says it happened.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cmath>
#include <memory>
#include <vector>

#include "device.h"

namespace {

using rankcall::now_ns;

int64_t g_busy_until = 0;  // when the current stream will be done
bool g_capturing = false, g_failing = false;

struct Event {
  int64_t at = 0;
};

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device here() { return {c10::DeviceType::PrivateUse1, 0}; }
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device) const override { return here(); }
  c10::Device getDevice() const override { return here(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, here()); }
  c10::Stream getNewStream(c10::Device, int) const override { return c10::Stream(c10::Stream::UNSAFE, here(), 7); }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream(here()); }
  bool isStreamCapturing(const c10::Stream&) const override { return g_capturing; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    if (g_failing) throw std::runtime_error("device lost");
    if (flag != c10::EventFlag::BACKEND_DEFAULT) throw std::runtime_error("timing is off");
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->at = stream.id() == 7 ? now_ns() : std::max(now_ns(), g_busy_until);
  }
  bool queryEvent(void* event) const override { return now_ns() >= static_cast<Event*>(event)->at; }
  void synchronizeEvent(void* event) const override {
    while (!queryEvent(event)) {
    }
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return (static_cast<Event*>(second)->at - static_cast<Event*>(first)->at) / 1e6;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
};

FakeGuard g_guard;

struct World {
  static constexpr uint64_t kCapacity = 64;
  std::vector<char> memory;
  std::unique_ptr<rankcall::Ring> ring;
  std::unique_ptr<rankcall::DeviceTimes> times;
  rankcall::DeviceTimes::Span* span = nullptr;
  uint64_t index = 0;
} g_world;

PyObject* reset(PyObject*, PyObject*) {
  constexpr uint64_t kInflight = 4096, kTables = kInflight + 8 * sizeof(rankcall::Record), kRecords = kTables + 4096;
  g_capturing = g_failing = false;
  g_busy_until = 0;
  g_world = World{};
  g_world.memory.assign(kRecords + World::kCapacity * sizeof(rankcall::Record), 0);
  g_world.ring = std::make_unique<rankcall::Ring>(
      g_world.memory.data(), rankcall::Geometry{World::kCapacity, 8, 4096, kInflight, kTables, kRecords});
  g_world.times = std::make_unique<rankcall::DeviceTimes>(*g_world.ring);
  Py_RETURN_NONE;
}

PyObject* set_mode(PyObject*, PyObject* args) {
  int capturing, failing;
  if (!PyArg_ParseTuple(args, "pp", &capturing, &failing)) return nullptr;
  g_capturing = capturing, g_failing = failing;
  Py_RETURN_NONE;
}

// Put work on the device; returns when it will be done.
PyObject* work(PyObject*, PyObject* milliseconds) {
  g_busy_until = std::max(now_ns(), g_busy_until) + static_cast<int64_t>(PyFloat_AsDouble(milliseconds) * 1e6);
  return PyLong_FromLongLong(g_busy_until);
}

// Issue an op as the recorder does. False where it gets no device times.
PyObject* begin(PyObject*, PyObject*) {
  g_world.span = g_world.times->begin(FakeGuard::here());
  if (!g_world.span) Py_RETURN_FALSE;
  g_world.ring->reserve(g_world.index);
  g_world.span->index = g_world.index;
  rankcall::Record* record = g_world.ring->begin(g_world.index);
  record->started_ns = record->completed_ns = 0;
  record->device_ms = std::nan("");
  record->status = rankcall::layout::kEnqueued;
  g_world.ring->publish(record, g_world.index);
  Py_RETURN_TRUE;
}

PyObject* end(PyObject*, PyObject*) {
  return PyBool_FromLong(g_world.times->end(g_world.span, {rankcall::layout::kCompleted, now_ns()}));
}

PyObject* poll(PyObject*, PyObject*) { return PyBool_FromLong(g_world.times->poll()); }

// (status, started_ns, completed_ns, device_ms) of the last op.
PyObject* last(PyObject*, PyObject*) {
  const auto* records = reinterpret_cast<const rankcall::Record*>(
      g_world.memory.data() + g_world.memory.size() - World::kCapacity * sizeof(rankcall::Record));
  const rankcall::Record& record = records[g_world.index];
  return Py_BuildValue("iLLd", record.status, static_cast<long long>(record.started_ns),
                       static_cast<long long>(record.completed_ns), record.device_ms);
}

PyMethodDef g_methods[] = {{"reset", reset, METH_NOARGS, ""}, {"set_mode", set_mode, METH_VARARGS, ""},
                           {"work", work, METH_O, ""},        {"begin", begin, METH_NOARGS, ""},
                           {"end", end, METH_NOARGS, ""},     {"poll", poll, METH_NOARGS, ""},
                           {"last", last, METH_NOARGS, ""},   {nullptr, nullptr, 0, nullptr}};
PyModuleDef g_module = {PyModuleDef_HEAD_INIT, "device_probe", nullptr, -1, g_methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_device_probe() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::PrivateUse1)].store(&g_guard);
  return PyModule_Create(&g_module);
}
