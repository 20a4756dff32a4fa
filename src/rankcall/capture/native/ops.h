// The position and the meaning of each argument of an op: from its schema, because torch adds ops,
// and from the table of ops in rankcall/record.py. issue.h reads the arguments at these positions.
#pragma once

#include <ATen/SparseTensorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "layout.h"

namespace rankcall {

struct Op {
  std::string name;
  uint8_t code = 0;  // layout's op code
  size_t arguments = 0;
  bool returns_work = false;
  bool p2p = false;
  bool coalesced = false;
  int process_group = -1, root = -1, src = -1, dst = -1, tag = -1, async_op = -1, reduce_op = -1;
  int in_splits = -1, out_splits = -1, input = -1, output = -1, in_place = -1, other_tensor = -1;
};

// Describe one op. False if it takes no process group, so that there is nothing to record.
inline bool describe(const c10::FunctionSchema& schema, Op& op) {
  op.arguments = schema.arguments().size();
  for (size_t i = 0; i < op.arguments; i++) {
    const auto& argument = schema.arguments()[i];
    const std::string& name = argument.name();
    const int at = static_cast<int>(i);
    const bool tensors = argument.type()->annotation_str().find("Tensor") != std::string::npos;
    if (name == "process_group") op.process_group = at;
    else if (name == "root_rank") op.root = at;
    else if (name == "src") op.src = at;
    else if (name == "dst") op.dst = at;
    else if (name == "tag") op.tag = at;
    else if (name == "async_op") op.async_op = at;
    else if (name == "reduce_op") op.reduce_op = at;
    else if (name == "input_split_sizes") op.in_splits = at;
    else if (name == "output_split_sizes") op.out_splits = at;
    else if (!tensors || name == "sparse_indices") continue;
    else if (name.rfind("output", 0) == 0) op.output = at;
    else if (name.rfind("input", 0) == 0) op.input = at;
    else if (name == "tensors") op.in_place = at;
    else op.other_tensor = at;
  }
  const auto& returns = schema.returns();
  op.returns_work = !returns.empty() && returns.back().type()->annotation_str().find("Work") != std::string::npos;
  op.coalesced = schema.name().find("coalesced") != std::string::npos;
  op.p2p = layout::kP2pOps[op.code];
  return op.process_group >= 0;
}

// The C++ object that a torchbind value holds, without touching its reference count.
template <typename T>
T* held(const c10::IValue& value) {
  const void* pointer = value.toObjectRef().getSlot(0).internalToPointer();
  return static_cast<T*>(static_cast<torch::CustomClassHolder*>(const_cast<void*>(pointer)));
}

// Visit every tensor of an argument: a tensor, a list, or a list of lists.
template <typename Visit>
void each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) each_tensor(item, visit);
  }
}

inline uint64_t bytes_of(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  if (tensor.is_sparse()) {
    const auto* sparse = static_cast<const at::SparseTensorImpl*>(impl);
    return bytes_of(sparse->indices()) + bytes_of(sparse->values());
  }
  return static_cast<uint64_t>(impl->numel()) * impl->itemsize();
}

struct Sizes {
  uint64_t bytes = 0;
  uint32_t tensors = 0;
  const at::Tensor* first = nullptr;
};

inline Sizes sizes_of(const c10::IValue* value) {
  Sizes sizes;
  if (value) {
    each_tensor(*value, [&](const at::Tensor& tensor) {
      if (!sizes.first) sizes.first = &tensor;
      sizes.bytes += bytes_of(tensor);
      sizes.tensors++;
    });
  }
  return sizes;
}

// FNV-1a over words, folded to 32 bits; never 0, which means "nothing to tell apart".
class Hash {
 public:
  void add(int64_t word) {
    state_ = (state_ ^ static_cast<uint64_t>(word)) * 0x100000001b3ull;
  }
  uint32_t folded() const {
    const uint32_t value = static_cast<uint32_t>(state_ ^ (state_ >> 32));
    return value ? value : 1;
  }

 private:
  uint64_t state_ = 0xcbf29ce484222325ull;
};

// The bytes of a send to oneself, which no message carries: by the split sizes, or an equal share.
inline uint64_t own_slice(const Op& op, const c10::IValue* arguments, uint64_t in_bytes, int rank, int size) {
  if (op.in_splits < 0) {  // a list of tensors, one a rank
    const auto inputs = arguments[op.input].toListRef();
    return static_cast<size_t>(rank) < inputs.size() ? bytes_of(inputs[rank].toTensor()) : 0;
  }
  const auto splits = arguments[op.in_splits].toIntVector();
  if (splits.empty()) return size > 0 ? in_bytes / size : 0;
  int64_t rows = 0;
  for (int64_t split : splits) rows += split;
  if (rows <= 0 || static_cast<size_t>(rank) >= splits.size()) return 0;
  return in_bytes / rows * splits[rank];
}

// What a message of this op carries on this rank, as shared conventions count it (docs/records.md).
inline uint64_t message_bytes(const Op& op, const c10::IValue* arguments, const Sizes& in, const Sizes& out,
                              int rank, int size) {
  switch (layout::kMessages[op.code]) {
    case layout::kMessageOutput:
      return out.bytes;
    case layout::kMessageGathered:
      return out.tensors ? out.bytes - in.bytes : in.bytes;
    case layout::kMessageScattered:
      return in.tensors ? in.bytes - out.bytes : out.bytes;
    case layout::kMessageExchanged:
      return in.bytes - own_slice(op, arguments, in.bytes, rank, size);
    case layout::kMessageOneByte:
      return 1;
    default:
      return in.bytes;
  }
}

}  // namespace rankcall
