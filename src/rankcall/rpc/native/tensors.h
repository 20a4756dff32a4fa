// The tensors of a message as a pickle of their shapes, and one plain buffer for each storage.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/csrc/distributed/rpc/utils.h>
#include <torch/csrc/jit/serialization/pickler.h>
#include <torch/csrc/jit/serialization/unpickler.h>

#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "wire.h"

namespace rankcall {

namespace rpc = torch::distributed::rpc;

struct TensorPack {
  std::string pickle;
  std::vector<c10::Storage> storages;  // in host memory
  std::vector<DeviceTag> tags;
};

inline DeviceTag target_of(const at::Tensor& tensor, const rpc::DeviceMap& map,
                           const std::string& to) {
  auto found = map.find(tensor.device());
  if (found == map.end()) {
    TORCH_CHECK(tensor.device().is_cpu(), "a tensor on ", tensor.device(),
                " cannot go to worker '", to, "': no device map says where it lands there. Pass "
                "device_maps={'", to, "': {...}} to the back end's options, or move it to the CPU");
    return {0, -1};
  }
  return {int8_t(found->second.type()), int8_t(found->second.index())};
}

// Returns the tensor in host memory; `pending` collects the devices whose copies are in flight.
inline at::Tensor staged(const at::Tensor& tensor, std::vector<c10::Device>& pending) {
  if (tensor.device().is_cpu()) return tensor;
  at::NoGradGuard no_grad;
  if (tensor.layout() != at::kStrided) return tensor.cpu();
  auto host = at::empty_like(tensor, tensor.options().device(at::kCPU).pinned_memory(true));
  host.copy_(tensor, /*non_blocking=*/true);
  if (std::find(pending.begin(), pending.end(), tensor.device()) == pending.end())
    pending.push_back(tensor.device());
  return host.set_requires_grad(tensor.requires_grad());
}

inline TensorPack pack(const std::vector<at::Tensor>& tensors, const rpc::DeviceMap& map,
                       const std::string& to) {
  TensorPack packed;
  if (tensors.empty()) return packed;
  std::vector<at::Tensor> on_host;
  std::vector<c10::Device> pending;
  for (const auto& tensor : tensors) {
    packed.tags.push_back(target_of(tensor, map, to));
    on_host.push_back(staged(tensor, pending));
  }
  for (const auto& device : pending)
    c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
  torch::jit::Pickler pickler(
      [&](const char* data, size_t size) { packed.pickle.append(data, size); });
  pickler.protocol();
  pickler.pushIValue(rpc::cloneSparseTensors(on_host));
  pickler.stop();
  for (const auto& each : pickler.tensorData())
    packed.storages.push_back(each.storage());
  return packed;
}

// A storage that has arrived.
struct Buffer {
  at::DataPtr data;
  std::size_t bytes;
};

// The pickle says how large a storage is; the buffer must be as large.
inline void check_storage(const at::Tensor& tensor,
                          const std::unordered_map<const void*, std::size_t>& sizes) {
  if (!tensor.defined() || tensor.numel() == 0) return;
  if (tensor.layout() == at::kStrided) {
    auto found = sizes.find(tensor.storage().data());
    if (found == sizes.end() || tensor.storage().nbytes() > found->second)
      throw WireError("a tensor is larger than the buffer that came for it");
  } else if (tensor.layout() == at::kSparse) {
    check_storage(tensor._indices(), sizes);
    check_storage(tensor._values(), sizes);
  }
}

inline at::Tensor placed(at::Tensor tensor, DeviceTag tag) {
  c10::Device device(c10::DeviceType(tag.type), tag.index);
  if (device.is_cpu()) return tensor;
  at::NoGradGuard no_grad;
  bool wants_grad = tensor.requires_grad();
  return tensor.to(device).set_requires_grad(wants_grad);
}

inline std::vector<at::Tensor> unpack(const char* pickle, std::size_t size,
                                      std::vector<Buffer> buffers,
                                      const std::vector<DeviceTag>& tags) {
  if (size == 0) return {};
  std::size_t at = 0;
  auto read = [&](char* into, size_t wanted) -> size_t {
    size_t given = std::min(wanted, size - at);
    std::memcpy(into, pickle + at, given);
    at += given;
    return given;
  };
  std::unordered_map<const void*, std::size_t> sizes;
  for (const auto& each : buffers) sizes[each.data.get()] = each.bytes;
  auto record = [&](const std::string& name) -> at::DataPtr {
    std::size_t index = std::stoul(name);
    if (index >= buffers.size()) throw WireError("a tensor names a buffer that did not come");
    return std::move(buffers[index].data);
  };
  torch::jit::Unpickler unpickler(read, nullptr, nullptr, record, std::nullopt);
  auto parsed = unpickler.parse_ivalue();
  if (!parsed.isTensorList()) throw WireError("the pickle is not a list of tensors");
  std::vector<at::Tensor> tensors;
  for (at::Tensor tensor : parsed.toTensorVector()) {
    check_storage(tensor, sizes);
    tensors.push_back(std::move(tensor));
  }
  if (tensors.size() != tags.size()) throw WireError("not every tensor's device is known");
  for (std::size_t i = 0; i < tensors.size(); i++) tensors[i] = placed(tensors[i], tags[i]);
  return tensors;
}

}  // namespace rankcall
