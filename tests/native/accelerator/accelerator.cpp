// The simulated accelerator as a Python module: see device.h, backend.h and __init__.py.
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <ATen/ATen.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>

#include <condition_variable>
#include <thread>

#include "backend.h"
#include "device.h"

namespace simulated {
namespace {

// --- memory: the host's, not counted ---

struct Allocator final : c10::Allocator {
  static c10::DataPtr make(size_t bytes) {
    void* memory = bytes ? std::calloc(1, bytes) : nullptr;
    return {memory, memory, &std::free, Guard::at(machine().device())};
  }
  c10::DataPtr allocate(size_t bytes) override { return make(bytes); }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Allocator g_allocator;

at::Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::Device on = Guard::at(device ? Guard::index_of(*device) : machine().device());
  const auto type = c10::scalarTypeToTypeMeta(dtype.value_or(at::ScalarType::Float));
  const auto fixed_sizes = C10_AS_INTARRAYREF_SLOW(sizes), fixed_strides = C10_AS_INTARRAYREF_SLOW(strides);
  const size_t bytes = at::detail::computeStorageNbytes(fixed_sizes, fixed_strides, type.itemsize());
  c10::DataPtr data = Allocator::make(bytes);
  data.unsafe_set_device(on);
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, std::move(data),
                                                      &g_allocator, /*resizable=*/true);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                         c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(fixed_sizes, fixed_strides);
  return tensor;
}

at::Tensor empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<at::Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat>) {
  std::vector<c10::SymInt> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  return empty_strided(sizes, strides, dtype, layout, device, pinned);
}

// Copies run at once on the host; the device's clock does not notice.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  const auto host_view = [](const at::Tensor& tensor) {
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  };
  host_view(to).copy_(host_view(from));
  return to;
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat>) {
  const auto fixed_sizes = C10_AS_INTARRAYREF_SLOW(sizes);
  auto* storage = self.storage().unsafeGetStorageImpl();
  const size_t bytes = self.itemsize() * (self.storage_offset() + c10::multiply_integers(fixed_sizes));
  if (bytes > storage->nbytes()) {
    c10::DataPtr larger = Allocator::make(bytes);
    larger.unsafe_set_device(self.device());
    if (storage->nbytes()) std::memcpy(larger.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr(std::move(larger));
    storage->set_nbytes(bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(fixed_sizes);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) resize(to, c10::fromIntArrayRefSlow(from.sizes()), std::nullopt);
  return copy_from(from, to, false);
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return machine().contexts().count(device) != 0; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(machine().device()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { machine().set_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto old = getCurrentDevice();
    machine().set_device(device);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
};

// --- the watchdog's thread, if a test wants one ---

class Watchdog {
 public:
  void run(bool on) {
    if (on && !thread_.joinable()) {
      stopping_ = false;
      thread_ = std::thread([this] { loop(); });
      pthread_setname_np(thread_.native_handle(), "sim_watchdog");
    } else if (!on && thread_.joinable()) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
      }
      changed_.notify_one();
      thread_.join();
    }
  }

 private:
  void loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopping_) {
      Backend::tick();
      changed_.wait_for(lock, std::chrono::milliseconds(100));
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::thread thread_;
};
Watchdog& watchdog() {
  static auto* instance = new Watchdog;  // never destroyed: a process may end while it runs
  return *instance;
}

StreamId checked(int device, int stream) {
  Machine::check_device(device);
  if (stream < 0 || stream >= kStreams) throw std::runtime_error("no such simulated stream");
  return {device, stream};
}

py::list calls() {
  py::list rows;
  for (const auto& [key, count] : machine().calls())
    rows.append(py::make_tuple(key.name, key.thread, key.thread_name, key.during_capture, count));
  return rows;
}

py::list dependencies() {
  py::list rows;
  for (const Dependency& each : machine().dependencies())
    rows.append(py::make_tuple(py::make_tuple(each.waiter.device, each.waiter.stream),
                               py::make_tuple(each.awaited.device, each.awaited.stream), each.reason, each.at_ns,
                               each.thread, each.stuck));
  return rows;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

}  // namespace simulated

PYBIND11_MODULE(rankcall_test_accelerator, m) {
  using namespace simulated;
  static auto* guard = new Guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(kType)].store(guard);
  c10::SetAllocator(kType, &g_allocator);
  static auto* hooks = new Hooks;
  at::RegisterPrivateUse1HooksInterface(hooks);

  py::module_::import("torch._C._distributed_c10d");
  py::class_<Backend, c10d::Backend, c10::intrusive_ptr<Backend>>(m, "Backend")
      .def(py::init([](int rank, int size, bool on_caller_stream, bool keeps_status) {
        return c10::make_intrusive<Backend>(rank, size, on_caller_stream, keeps_status);
      }))
      .def_property_readonly("uid", &Backend::uid)
      .def_property(
          "op_ms", [](const Backend& self) { return self.op_ns / 1e6; },
          [](Backend& self, double ms) { self.op_ns = static_cast<int64_t>(ms * 1e6); })
      .def("outstanding", &Backend::outstanding)
      .def("stream", [](Backend& self, int device) { return self.stream(checked(device, 0).device).stream; });

  m.def("calls", &calls);
  m.def("dependencies", &dependencies);
  m.def("contexts", [] { return machine().contexts(); });
  m.def("reset", [] {
    Backend::forget_all();
    machine().reset();
  });
  m.def("clear_log", [] { machine().clear_log(); });
  m.def("freeze", [](bool on) { machine().freeze(on); });
  m.def("advance", [](double ms) { machine().advance(static_cast<int64_t>(ms * 1e6)); });
  m.def("put", [](int device, int stream, double ms) { machine().put(checked(device, stream), static_cast<int64_t>(ms * 1e6)); });
  m.def("hang", [](int device, int stream) { machine().put(checked(device, stream), kNever); });
  m.def("busy_ms", [](int device, int stream) {
    const StreamId id = checked(device, stream);
    std::lock_guard<std::recursive_mutex> lock(machine().mutex);
    return std::max<double>(0, (machine().busy(id) - machine().now()) / 1e6);
  });
  m.def("is_stuck", [](int device, int stream) {
    const StreamId id = checked(device, stream);
    std::lock_guard<std::recursive_mutex> lock(machine().mutex);
    return machine().busy(id) >= kNever;
  });
  m.def("begin_capture", [](int device, int stream) { machine().begin_capture(checked(device, stream)); });
  m.def("end_capture", [] { return machine().end_capture(); });
  m.def("replay", [] {
    for (const auto& [stream, duration] : machine().graph().work) machine().put(stream, duration);
    return machine().graph().work.size();
  });
  m.def("fail_events", [](bool on) { machine().failing = on; });
  m.def("tick", [] { Backend::tick(); }, py::call_guard<py::gil_scoped_release>());
  m.def("watchdog", [](bool on) { watchdog().run(on); }, py::call_guard<py::gil_scoped_release>());
  // Holds the GIL, as torch's own does.
  m.def(
      "dump_trace_json",
      [](std::optional<bool> entries, std::optional<bool>) { return py::bytes(Backend::status_json(entries.value_or(true))); },
      py::arg("includeCollectives") = std::nullopt, py::arg("onlyActive") = std::nullopt);
}
