// The boxed kernels, one in front of every c10d op.
//
// BackendSelect is in every tensor's default key set, so no mode, guard or subclass goes around it.
// A kernel never throws an error of its own, keeps no tensor, takes no lock across Python, and does
// not wait. Rings are closed by a bit in their head counter and outlive the last op in flight.
#pragma once

#include <sched.h>

#include <memory>
#include <string>
#include <torch/library.h>
#include <vector>

#include "completion_source.h"
#include "issue.h"

namespace rankcall {
namespace {

// torch's Flight Recorder adds a group to a table at the group's first op, and its readers read that
// table without a lock. device_status.py is such a reader, so the two keep out of each other's way:
// the reader gives up if a first op is under way, and a first op waits a moment for the reader.
std::atomic<int> g_first_ops{0};
std::atomic<bool> g_reading_status{false};

class FirstOp {
 public:
  explicit FirstOp(bool first) : first_(first) {
    if (!first_) return;
    g_first_ops.fetch_add(1);
    // A look takes some tens of microseconds. A reader that was stopped in it must not hold up the op.
    constexpr int64_t kMostNs = 2'000'000;
    for (const int64_t until = now_ns() + kMostNs; g_reading_status.load() && now_ns() < until;) sched_yield();
  }
  ~FirstOp() {
    if (first_) g_first_ops.fetch_sub(1);
  }
  FirstOp(const FirstOp&) = delete;
  FirstOp& operator=(const FirstOp&) = delete;

 private:
  const bool first_;
};

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
    const FirstOp first(issued.first && issued.on_device);
    op.redispatchBoxed(next, stack);
  } catch (const std::exception& error) {
    end_record(*issued.recorder, issued.index, failure(*issued.recorder, error.what()));
    throw;
  } catch (...) {
    end_record(*issued.recorder, issued.index, failure(*issued.recorder, "unknown error"));
    throw;
  }
  Recorder& recorder = *issued.recorder;
  const uint64_t index = issued.index;
  try {
    arrange_completion(g_ops[Which], *stack, issued);
  } catch (...) {
    abandon(recorder, index);  // no memory, for example; the op itself goes on
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

template <size_t Which = 0>
void install_each(torch::Library& library) {
  if constexpr (Which < kMaxOps) {
    if (Which >= g_op_count) return;
    library.impl(g_ops[Which].name.c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel<Which>>());
    install_each<Which + 1>(library);
  }
}

// Put the kernels in front of the ops, for the rest of the process. They are never taken out again:
// the dispatcher raises "fallthrough_kernel was executed" in threads that issue an op meanwhile, and
// a library that is destroyed at exit would do the same to daemon threads.
void install() {
  // torch warns on stderr if the Python capture's kernels are there already.
  struct Silent final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  auto* library = new torch::Library(torch::Library::IMPL, "c10d", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
  install_each(*library);
}

}  // namespace
}  // namespace rankcall
