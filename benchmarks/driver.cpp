// Issues collectives at a rate no Python thread can: all_reduce in a loop, without the GIL.
#include <chrono>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/extension.h>

namespace {

// Call allreduce `count` times through the dispatcher, `interval_ns` apart (0: as fast as it goes).
// Returns the seconds it took.
double drive(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const at::Tensor& tensor, int64_t count,
             int64_t interval_ns) {
  using Clock = std::chrono::steady_clock;
  pybind11::gil_scoped_release without_gil;
  std::vector<at::Tensor> tensors{tensor};
  const auto began = Clock::now();
  for (int64_t i = 0; i < count; i++) {
    if (interval_ns > 0) {
      const auto due = began + std::chrono::nanoseconds(interval_ns * i);
      while (Clock::now() < due) {
      }
    }
    group->allreduce(tensors);
  }
  return std::chrono::duration<double>(Clock::now() - began).count();
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("drive", &drive, pybind11::arg("group"), pybind11::arg("tensor"), pybind11::arg("count"),
             pybind11::arg("interval_ns"));
}
