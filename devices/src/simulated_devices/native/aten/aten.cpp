// Right numbers without kernels: aten's CUDA ops run the CPU's kernels, on CPU tensors that share the
// memory of the device's, in the order of the current stream.
//
// Each op that has a kernel of its own for CUDA gets one boxed kernel instead, `run_on_cpu`. If the stream
// is idle, it computes at once. Otherwise the shapes of the outputs come from the op's Meta kernel and the
// computation is an operation of the stream, so that the host runs ahead as it does with a GPU. An op whose
// shapes depend on data, or that has no Meta kernel, waits for the stream first.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Stream.h>
#include <torch/library.h>

#include <set>
#include <string>

#include "../common/settings.h"
#include "../runtime/bridge.h"
#include "composed.h"

extern "C" cudaError_t cudaGetDevice(int*);
extern "C" cudaError_t cudaSetDevice(int);
extern "C" cudaError_t cudaStreamSynchronize(cudaStream_t);
extern "C" cudaError_t cudaEventCreateWithFlags(cudaEvent_t*, unsigned);
extern "C" cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t);
extern "C" cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned);
extern "C" cudaError_t cudaEventDestroy(cudaEvent_t);

// c10's header of this class includes CUDA's headers, which are not there. Only its layout counts.
namespace c10::cuda {
class CUDAStream {
 public:
  cudaStream_t stream() const;

 private:
  Stream stream_;
};
CUDAStream getCurrentCUDAStream(DeviceIndex device);
}  // namespace c10::cuda

namespace simulated {
namespace {

using torch::jit::Stack;

// ---------------------------------------------------------------------------------------------------------
// Tensors
// ---------------------------------------------------------------------------------------------------------

// A CPU tensor over the memory of a device's tensor.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  at::Tensor alias =
      at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), [](void*) {}, options, at::kCPU);
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

// As an argument of an operation that may run later: a CPU tensor may have changed by then.
at::Tensor on_cpu_later(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cuda()) return on_cpu(tensor);
  return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : tensor.clone();
}

// A number of the program's, which torch passes as a tensor, stays one: kernels in Python want its value.
at::Tensor on_meta(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).requires_grad(false));
}

at::Tensor on_device(const at::Tensor& like, c10::Device device) {
  if (!like.defined()) return like;
  auto options = like.options().device(device);
  return like.is_non_overlapping_and_dense() ? at::empty_strided(like.sizes(), like.strides(), options)
                                             : at::empty(like.sizes(), options);
}

template <class F>
c10::IValue mapped(const c10::IValue& value, F&& f, c10::Device device) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& tensor : value.toTensorList()) out.push_back(f(tensor));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
      out.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(f(*tensor)) : std::nullopt);
    return out;
  }
  if (value.isDevice() && value.toDevice().is_cuda()) return device;
  return value;
}

template <class F>
void for_tensors(const c10::IValue& value, F&& f) {
  if (value.isTensor()) f(value.toTensor());
  else if (value.isTensorList())
    for (const at::Tensor& tensor : value.toTensorList()) f(tensor);
  else if (value.isOptionalTensorList())
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
      if (tensor) f(*tensor);
}

// The null stream, which is torch's default one, is that of the current device.
class OnDevice {
 public:
  explicit OnDevice(c10::Device device) {
    cudaGetDevice(&before_);
    if (device.index() != before_) cudaSetDevice(device.index());
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

// ---------------------------------------------------------------------------------------------------------
// Random numbers: each op gets a CPU generator that is made from the device's seed and offset, and advances
// the offset. So torch.cuda's seeds and states mean what they always do, and the CPU's are not touched.
// ---------------------------------------------------------------------------------------------------------

at::Generator cpu_generator(std::optional<at::Generator> given, c10::Device device) {
  at::Generator of_device =
      given && given->defined() && given->device().is_cuda() ? *given : at::globalContext().defaultGenerator(device);
  std::lock_guard<std::mutex> hold(of_device.mutex());
  uint64_t seed = of_device.current_seed(), offset = 0;
  try {
    offset = of_device.get_offset();
    of_device.set_offset(offset + 4);  // CUDA's generator counts in fours
  } catch (const c10::Error&) {
    // A generator that is being captured keeps its offset to itself: each replay gets the same numbers.
  }
  return at::detail::createCPUGenerator(seed * 0x9e3779b97f4a7c15ull + offset);
}

// ---------------------------------------------------------------------------------------------------------
// One call of an op
// ---------------------------------------------------------------------------------------------------------

// On a device, an index out of bounds and a failed assertion end the kernel and, with it, the context.
bool is_device_assert(const std::string& op, const std::string& what) {
  auto has = [&](const char* part) { return what.find(part) != std::string::npos; };
  return op == "aten::_assert_async" || has("out of bounds") || has("index out of range in self");
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op),
        schema_(op.schema()),
        stack_(stack),
        count_(schema_.arguments().size()),
        first_(stack->size() - count_),
        device_(find_device()),
        guard_(device_),
        stream_(c10::cuda::getCurrentCUDAStream(device_.index()).stream()) {
    check_devices();
    for (size_t i = 0; i < count_; ++i) {
      auto* alias = schema_.arguments()[i].alias_info();
      writes_ = writes_ || (alias && alias->isWrite());
      has_out_ = has_out_ || schema_.arguments()[i].is_out();
    }
  }

  void run() {
    const bool now = simulated_runs_inline(stream_);
    if (has_out_) return run_into_outputs(now);
    if (writes_) return run_in_place(now);
    if (now) return compute_now();
    if (!compute_later()) {
      wait();
      compute_now();
    }
  }

 private:
  const c10::IValue& argument(size_t i) const { return (*stack_)[first_ + i]; }

  c10::Device find_device() const {
    std::optional<c10::Device> found;
    for (size_t i = 0; i < count_ && !found; ++i) {
      for_tensors(argument(i), [&](const at::Tensor& tensor) {
        if (!found && tensor.defined() && tensor.is_cuda()) found = tensor.device();
      });
      if (!found && argument(i).isDevice() && argument(i).toDevice().is_cuda()) found = argument(i).toDevice();
    }
    int current = 0;
    if (!found || found->index() < 0) cudaGetDevice(&current);
    return !found || found->index() < 0 ? c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(current)) : *found;
  }

  // CUDA's kernels refuse tensors of several devices, which the CPU's, to whom all are alike, would take.
  void check_devices() const {
    if (schema_.name().find("index") != std::string::npos) return;  // indices may lie on the CPU
    for (size_t i = 0; i < count_; ++i) {
      if (!argument(i).isTensor()) continue;
      const at::Tensor& tensor = argument(i).toTensor();
      if (!tensor.defined() || tensor.device() == device_ || (tensor.is_cpu() && tensor.dim() == 0)) continue;
      TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", device_,
                  " and ", tensor.device(), "!");
    }
  }

  Stack cpu_arguments(bool later) const {
    Stack arguments;
    arguments.reserve(count_);
    for (size_t i = 0; i < count_; ++i) {
      bool is_generator = schema_.arguments()[i].name() == "generator";
      if (is_generator) {
        auto given = argument(i).isGenerator() ? std::optional<at::Generator>(argument(i).toGenerator()) : std::nullopt;
        arguments.emplace_back(cpu_generator(given, device_));
      } else if (later) {
        arguments.push_back(mapped(argument(i), on_cpu_later, c10::kCPU));
      } else {
        arguments.push_back(mapped(argument(i), on_cpu, c10::kCPU));
      }
    }
    return arguments;
  }

  // The outputs that the op's Meta kernel promises, as tensors on Meta; false if it does not say.
  bool infer(Stack* out) const {
    if (!op_.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return false;
    for (size_t i = 0; i < count_; ++i) out->push_back(mapped(argument(i), on_meta, c10::kMeta));
    try {
      op_.callBoxed(out);
    } catch (const std::exception& error) {
      // There is no such kernel after all, or the arguments are wrong, which the CPU's kernel says better.
      if (settings().trace)
        say("the outputs of %s are not known before it runs: %.300s", schema_.name().c_str(), error.what());
      return false;
    }
    for (auto& value : *out)
      if (!value.isTensor() && !value.isTensorList()) return false;
    return true;
  }

  void wait() const {
    TORCH_CHECK(cudaStreamSynchronize(stream_) == cudaSuccess, schema_.name(),
                " cannot run on the simulated device now: the device has failed, or a stream is being captured");
  }

  void replace_arguments(Stack results) {
    torch::jit::drop(*stack_, count_);
    for (auto& result : results) stack_->push_back(std::move(result));
  }

  // Runs the CPU's kernel in this thread. False if a device would have failed; then the outputs are unknown.
  static bool call(const c10::OperatorHandle& op, Stack* arguments, int device, bool throws) {
    at::AutoDispatchBelowADInplaceOrView below;
    try {
      op.callBoxed(arguments);
      return true;
    } catch (const std::exception& error) {
      const std::string what = error.what(), name = op.schema().name();
      const bool asserts = is_device_assert(name, what);
      if (throws && !asserts) throw;
      std::string why = name + ": " + what.substr(0, what.find('\n'));
      simulated_fail_device(device, cudaErrorAssert, why.c_str());
      return false;
    }
  }

  void enqueue_call(Stack arguments, std::function<void(Stack*)> finish) {
    // A graph runs it again and again, so each run gets a copy of the arguments.
    auto shared = std::make_shared<const Stack>(std::move(arguments));
    auto run = [op = op_, shared, finish = std::move(finish), device = device_.index()] {
      Stack own = *shared;
      if (call(op, &own, device, false) && finish) {
        at::AutoDispatchBelowADInplaceOrView below;
        finish(&own);
      }
    };
    TORCH_CHECK(enqueue(stream_, true, {nullptr, std::move(run)}) == cudaSuccess, schema_.name(),
                " could not be enqueued: the device has failed");
  }

  // --- New outputs ---

  void compute_now() {
    Stack values = cpu_arguments(false);
    if (!call(op_, &values, device_.index(), true)) {
      Stack shapes, outputs;
      TORCH_CHECK(infer(&shapes), schema_.name(), ": device-side assert triggered");
      for (auto& shape : shapes)
        outputs.push_back(mapped(shape, [this](const at::Tensor& t) { return on_device(t, device_); }, device_));
      return replace_arguments(std::move(outputs));
    }
    Stack outputs;
    for (auto& value : values)
      outputs.push_back(mapped(
          value,
          [this](const at::Tensor& result) {
            at::Tensor out = on_device(result, device_);
            if (out.defined() && out.numel()) copy(on_cpu(out), result);
            return out;
          },
          device_));
    replace_arguments(std::move(outputs));
  }

  bool compute_later() {
    Stack shapes;
    if (!infer(&shapes)) return false;
    Stack outputs, targets;
    for (auto& shape : shapes) {
      outputs.push_back(mapped(shape, [this](const at::Tensor& t) { return on_device(t, device_); }, device_));
      targets.push_back(mapped(outputs.back(), on_cpu, c10::kCPU));
    }
    enqueue_call(cpu_arguments(true), [targets](Stack* results) {
      for (size_t i = 0; i < targets.size(); ++i) {
        if (targets[i].isTensor()) {
          copy(targets[i].toTensor(), (*results)[i].toTensor());
          continue;
        }
        auto to = targets[i].toTensorList(), from = (*results)[i].toTensorList();
        for (size_t j = 0; j < to.size(); ++j) copy(to.get(j), from.get(j));
      }
    });
    replace_arguments(std::move(outputs));
    return true;
  }

  static void copy(const at::Tensor& to, const at::Tensor& from) {
    if (!to.defined() || !from.defined() || !to.numel()) return;
    at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
  }

  // --- Outputs that are among the arguments ---

  // What the op returns: the arguments with the same alias annotation.
  Stack written_arguments() const {
    Stack results;
    for (const auto& returned : schema_.returns())
      for (size_t i = 0; i < count_; ++i) {
        auto *of_argument = schema_.arguments()[i].alias_info(), *of_return = returned.alias_info();
        if (!of_argument || !of_return || of_argument->beforeSets() != of_return->beforeSets()) continue;
        results.push_back(argument(i));
        break;
      }
    return results;
  }

  void run_in_place(bool now) {
    // An op that also returns something new is rare, for example _batch_norm_with_update: it waits.
    Stack results = written_arguments();
    const bool only_arguments = results.size() == schema_.returns().size();
    if (!now && only_arguments) {
      check_shapes();
      enqueue_call(cpu_arguments(true), nullptr);
      return replace_arguments(std::move(results));
    }
    if (!now) wait();
    Stack values = cpu_arguments(false);
    bool fine = call(op_, &values, device_.index(), true);
    if (only_arguments) return replace_arguments(std::move(results));
    TORCH_CHECK(fine, schema_.name(), ": device-side assert triggered");
    Stack outputs;
    size_t written = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      if (schema_.returns()[i].alias_info()) {
        outputs.push_back(results[written++]);
        continue;
      }
      outputs.push_back(mapped(
          values[i],
          [this](const at::Tensor& result) {
            at::Tensor out = on_device(result, device_);
            if (out.defined()) copy(on_cpu(out), result);
            return out;
          },
          device_));
    }
    replace_arguments(std::move(outputs));
  }

  // An in-place op says at once if its shapes are wrong, as it does on a device.
  void check_shapes() const {
    if (!op_.hasKernelForDispatchKey(c10::DispatchKey::Meta)) return;
    Stack shapes;
    for (size_t i = 0; i < count_; ++i) shapes.push_back(mapped(argument(i), on_meta, c10::kMeta));
    try {
      op_.callBoxed(&shapes);
    } catch (const c10::NotImplementedError&) {
    }
  }

  // The tensors of out= arguments may have to be resized, and memory of a device cannot be from here.
  void run_into_outputs(bool now) {
    if (!now) {
      Stack shapes;
      if (infer(&shapes) && resize_outputs(shapes)) {
        enqueue_call(cpu_arguments(true), nullptr);
        return replace_arguments(written_arguments());
      }
      wait();
    }
    Stack values = cpu_arguments(false);
    for (size_t i = 0; i < count_; ++i)
      if (schema_.arguments()[i].is_out())
        values[i] = mapped(
            values[i],
            [](const at::Tensor& out) {
              return out.defined() && out.numel() == 0 ? at::empty({0}, out.options()) : out;
            },
            c10::kCPU);
    Stack outputs = written_arguments();
    if (!call_with_fresh_outputs(&values)) return replace_arguments(std::move(outputs));
    for (size_t i = 0; i < outputs.size() && i < values.size(); ++i) {
      if (!outputs[i].isTensor() || !values[i].isTensor()) continue;
      at::Tensor out = outputs[i].toTensor(), result = values[i].toTensor();
      if (out.sizes() != result.sizes()) out.resize_(result.sizes());
      if (out.numel() && out.data_ptr() != result.data_ptr()) copy(on_cpu(out), result);
    }
    replace_arguments(std::move(outputs));
  }

  // The op writes to the memory of the outputs if they have the right sizes, and to new tensors if not.
  bool call_with_fresh_outputs(Stack* values) {
    Stack attempt = *values;
    try {
      return call(op_, &attempt, device_.index(), true) ? (*values = std::move(attempt), true) : false;
    } catch (const c10::Error&) {
      for (size_t i = 0; i < count_; ++i)
        if (schema_.arguments()[i].is_out())
          (*values)[i] = mapped(
              (*values)[i], [](const at::Tensor& out) { return out.defined() ? at::empty({0}, out.options()) : out; },
              c10::kCPU);
      return call(op_, values, device_.index(), true);
    }
  }

  bool resize_outputs(const Stack& shapes) {
    Stack outputs = written_arguments();
    if (outputs.size() != shapes.size()) return false;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].isTensor() || !shapes[i].isTensor()) return false;
      const at::Tensor& out = outputs[i].toTensor();
      if (out.sizes() != shapes[i].toTensor().sizes()) out.resize_(shapes[i].toTensor().sizes());
    }
    return true;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack* stack_;
  const size_t count_, first_;
  const c10::Device device_;
  const OnDevice guard_;
  const cudaStream_t stream_;
  bool writes_ = false, has_out_ = false;
};

void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  Call(op, stack).run();
}

// ---------------------------------------------------------------------------------------------------------
// Ops with kernels of their own
// ---------------------------------------------------------------------------------------------------------

// Makes the current stream of one device wait for all that is in another's now.
void order(c10::Device first, c10::Device later) {
  cudaEvent_t event = nullptr;
  {
    OnDevice guard(first);
    cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    cudaEventRecord(event, c10::cuda::getCurrentCUDAStream(first.index()).stream());
  }
  OnDevice guard(later);
  cudaStreamWaitEvent(c10::cuda::getCurrentCUDAStream(later.index()).stream(), event, 0);
  cudaEventDestroy(event);
}

// Copies between devices and between a device and the host, with torch's rules: it runs in the current
// stream of the source's device, and the host waits unless non_blocking is given and its memory is pinned.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (self.is_same(source) || !self.numel()) return self;
  at::Tensor from = source.sizes() == self.sizes() ? source : source.expand(self.sizes());
  const bool host_waits = !self.is_cuda() || !from.is_cuda();
  const c10::Device device = from.is_cuda() ? from.device() : self.device();
  const OnDevice guard(device);
  cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
  const bool between_devices = self.is_cuda() && from.is_cuda() && self.device() != from.device();
  if (between_devices) order(self.device(), device);
  const at::Tensor& host = self.is_cuda() ? from : self;
  const bool pinned = host_waits && host.is_pinned();
  at::Tensor to_alias = on_cpu(self), from_alias = on_cpu(from);
  if (host_waits && non_blocking && !pinned && !from.is_cuda() && !simulated_runs_inline(stream))
    from_alias = from.clone();  // staged, as CUDA does
  auto run = [to_alias, from_alias] {
    at::AutoDispatchBelowADInplaceOrView inner;
    at::Tensor to = to_alias;
    to.copy_(from_alias);
  };
  TORCH_CHECK(enqueue(stream, true, {nullptr, run}) == cudaSuccess,
              "the copy could not be enqueued: the device has failed");
  if (between_devices) order(device, self.device());
  const bool waits = host_waits && !(non_blocking && (pinned || self.is_cuda()));
  if (waits && !simulated_is_capturing(stream))
    TORCH_CHECK(cudaStreamSynchronize(stream) == cudaSuccess, "CUDA error: the copy failed with the device");
  return self;
}

// The CPU has no softmax of half floats into floats, which autocast asks a device for: it gets floats.
void softmax(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::IValue &input = torch::jit::peek(*stack, 0, 3), &half_to_float = torch::jit::peek(*stack, 2, 3);
  if (half_to_float.toBool()) {
    input = input.toTensor().to(at::kFloat);
    half_to_float = false;
  }
  run_on_cpu(op, keys, stack);
}

// Nor has it the derivative, of the dtype that the input had.
void softmax_backward(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  const at::ScalarType wanted = torch::jit::peek(*stack, 3, 4).toScalarType();
  torch::jit::peek(*stack, 3, 4) = torch::jit::peek(*stack, 0, 4).toTensor().scalar_type();
  run_on_cpu(op, keys, stack);
  stack->back() = stack->back().toTensor().to(wanted);
}

// ---------------------------------------------------------------------------------------------------------
// Installation
// ---------------------------------------------------------------------------------------------------------

// Ops that only look at or change a tensor's metadata, or allocate: torch's own CUDA kernels are right.
const std::set<std::string>& kept() {
  static const std::set<std::string> names = {"empty",
                                              "empty_strided",
                                              "new_empty",
                                              "new_empty_strided",
                                              "resize_",
                                              "resize_as_",
                                              "_resize_output_",
                                              "set_",
                                              "set_data",
                                              "is_set_to",
                                              "_local_scalar_dense",
                                              "record_stream",
                                              "is_pinned",
                                              "_pin_memory",
                                              "_copy_from",
                                              "_copy_from_and_resize",
                                              "_efficientzerotensor",
                                              "_cudnn_init_dropout_state",
                                              "_has_same_storage_numel",
                                              "_to_copy",
                                              "clone",
                                              "contiguous",
                                              "lift",
                                              "lift_fresh",
                                              "copy_",
                                              "native_dropout"};
  return names;
}

// Ops that choose among libraries of the device, cuDNN's for example, before any kernel is asked for.
const std::set<std::string>& chosen() {
  static const std::set<std::string> names = {"convolution", "convolution_overrideable", "convolution_backward",
                                              "convolution_backward_overrideable", "_convolution"};
  return names;
}

bool returns_view(const c10::FunctionSchema& schema) {
  for (const auto& returned : schema.returns())
    if (returned.alias_info() && !returned.alias_info()->isWrite()) return true;
  return false;
}

bool replaces(const c10::OperatorHandle& op, const std::string& name) {
  if (kept().count(name) || returns_view(op.schema())) return false;
  if (!op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) return false;
  return op.hasKernelForDispatchKey(c10::DispatchKey::CUDA) || chosen().count(name);
}

// torch warns when kernels are replaced. That is what is meant here.
struct Silence : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

void install() {
  Silence silence;
  c10::WarningUtils::WarningHandlerGuard quiet(&silence);
  // Never destroyed: without it, torch's own kernels would come back while it shuts down.
  auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findOp(name);
    const std::string base = name.name.substr(6);
    if (!op || !op->hasSchema() || !replaces(*op, base)) continue;
    const std::string full = base + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
  library->impl("copy_", TORCH_FN(copy_));
  for (const char* name : {"_softmax", "_log_softmax"})
    library->impl(name, torch::CppFunction::makeFromBoxedFunction<&softmax>());
  for (const char* name : {"_softmax_backward_data", "_log_softmax_backward_data"})
    library->impl(name, torch::CppFunction::makeFromBoxedFunction<&softmax_backward>());
  auto* above_autograd =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradCUDA, __FILE__, __LINE__);
  add_composed(*library, *above_autograd);
  // cuDNN's code is for real devices. Without it, torch takes the ops that are replaced here.
  at::globalContext().setUserEnabledCuDNN(false);
}

}  // namespace
}  // namespace simulated

extern "C" __attribute__((visibility("default"))) void simulated_aten_install() { simulated::install(); }
