// The boxed kernels, one in front of every c10d op.
//
// BackendSelect is in every tensor's default key set, so no mode, guard or subclass goes around it.
// A kernel never throws of its own accord, keeps no tensor, takes no lock across Python, and does
// not wait. Rings are closed by a bit in their head counter and outlive the last op in flight.
#pragma once

#include <memory>
#include <string>
#include <torch/library.h>
#include <vector>

#include "follow.h"
#include "issue.h"

namespace rankcall {
namespace {

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

}  // namespace
}  // namespace rankcall
