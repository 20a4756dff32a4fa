// Sending: calls, and the answers to those of others.
#include "agent.h"

namespace rankcall {

namespace {

// Keeps what a sent frame's bytes belong to until ZeroMQ has sent them.
void release_data(void*, void* kept) {
  delete static_cast<torch::jit::WriteableTensorData*>(kept);
}

// The receiver would drop the connection, and whatever else is on it.
void check_size(const char* what, std::size_t bytes, const Peer& peer) {
  TORCH_CHECK(int64_t(bytes) <= peer.max_bytes, what, " of ", bytes, " bytes is more than worker '",
              peer.info.name_, "' takes: its max_message_bytes is ", peer.max_bytes);
}

}  // namespace

Future ZmqAgent::send(const rpc::WorkerInfo& to, c10::intrusive_ptr<Message> message,
                      const float timeout_s, const rpc::DeviceMap& device_map) {
  TORCH_CHECK(rpcAgentRunning_.load(), "Node ", getWorkerInfo().id_,
              " tried to send() a message of type ", message->type(),
              " but RPC is no longer running on this node.");
  auto peer = peers_.find(to.id_);
  if (!peer || peer->info.name_ != to.name_) {
    auto future = c10::make_intrusive<rpc::JitFuture>(at::AnyClassType::get());
    future->setError(std::make_exception_ptr(std::runtime_error(rpc::makeRPCError(
        "worker '" + to.name_ + "' is not, or no longer, in the group",
        rpc::RPCErrorType::UNKNOWN_ERROR))));
    return future;
  }
  auto map = device_map.empty() ? getDeviceMap(to) : device_map;
  return call(peer, Kind::kRequest, *message, timeout_s, map, at::AnyClassType::get());
}

Future ZmqAgent::control(const std::string& to, const std::string& payload, float timeout_s) {
  auto peer = peers_.find(to);
  TORCH_CHECK(peer, "could not find destination: there is no worker '", to, "' in the group");
  auto message = c10::make_intrusive<Message>(std::vector<char>(payload.begin(), payload.end()),
                                              std::vector<at::Tensor>{}, MessageType::UNKNOWN);
  return call(peer, Kind::kControl, *message, timeout_s, {}, c10::StringType::get());
}

Future ZmqAgent::call(const std::shared_ptr<Peer>& peer, Kind kind, Message& message,
                      float timeout_s, const rpc::DeviceMap& map, c10::TypePtr type) {
  auto timeout = timeout_s == rpc::kUnsetRpcTimeout
                     ? getRpcTimeout()
                     : milliseconds(timeout_s);
  if (timeout_s > 0 && timeout.count() == 0) timeout = std::chrono::milliseconds(1);
  auto future = c10::make_intrusive<rpc::JitFuture>(std::move(type), getDevices());
  uint64_t id = next_call_++;
  calls_.add(id, {future, peer, timeout, Clock::now() + timeout});
  std::string problem;
  try {
    problem = transmit(*peer, kind, id, message, map);
  } catch (...) {
    if (calls_.take(id)) calls_.ended();
    throw;
  }
  if (!problem.empty()) {
    if (auto call = calls_.take(id))
      fail(std::move(*call), problem, rpc::RPCErrorType::UNKNOWN_ERROR);
  }
  return future;
}

std::vector<Slot> ZmqAgent::place(Peer& peer, const TensorPack& pack,
                                  std::vector<torch::jit::WriteableTensorData>& frames) {
  TORCH_CHECK(pack.data.size() <= kMaxBuffers && pack.tags.size() <= kMaxBuffers,
              "a message to worker '", peer.info.name_, "' has ", pack.tags.size(),
              " tensors; the most is ", kMaxBuffers);
  std::vector<Slot> slots;
  for (const auto& each : pack.data) {
    Slot slot{uint32_t(Where::kPacked), 0, each.sizeInBytes(), 0};
    if (slot.bytes >= kLarge) {
      auto taken = peer.arena.empty() ? Arena::Taken{} : arena_.take(slot.bytes, peer.info.id_);
      if (taken.block) {
        std::memcpy(taken.block->data(), each.data(), slot.bytes);
        slot.where = uint32_t(Where::kArena);
        slot.block = taken.id;
      } else {
        check_size("a tensor", slot.bytes, peer);
        slot.where = uint32_t(Where::kFrame);
        frames.push_back(each);
      }
    }
    slots.push_back(slot);
  }
  return slots;
}

// Send, and return why it could not be done, or nothing.
std::string ZmqAgent::transmit(Peer& peer, Kind kind, uint64_t call, Message& message,
                               const rpc::DeviceMap& map) {
  TensorPack pack = rankcall::pack(message.tensors(), map, peer.info.name_);
  std::vector<torch::jit::WriteableTensorData> frames;
  std::vector<Slot> slots = place(peer, pack, frames);
  const auto& payload = message.payload();
  Header header{kMagic, uint8_t(kind), {}, settings_.session, peer.session, call, message.id(),
                payload.size(), pack.pickle.size(), int32_t(message.type()), getWorkerInfo().id_,
                uint32_t(slots.size()), uint32_t(pack.tags.size())};
  std::size_t size = sizeof header + slots.size() * sizeof(Slot) +
                     pack.tags.size() * sizeof(DeviceTag) + payload.size() + pack.pickle.size();
  for (const Slot& slot : slots) {
    if (slot.where == uint32_t(Where::kPacked)) size += slot.bytes;
  }
  check_size("a message", size, peer);
  ZmqMessage head;
  zmq_.msg_init_size(&head, size);
  char* at = static_cast<char*>(zmq_.msg_data(&head));
  auto put = [&](const void* data, std::size_t bytes) {
    if (bytes) std::memcpy(at, data, bytes);
    at += bytes;
  };
  put(&header, sizeof header);
  put(slots.data(), slots.size() * sizeof(Slot));
  put(pack.tags.data(), pack.tags.size() * sizeof(DeviceTag));
  put(payload.data(), payload.size());
  put(pack.pickle.data(), pack.pickle.size());
  for (std::size_t i = 0; i < slots.size(); i++) {
    if (slots[i].where == uint32_t(Where::kPacked)) put(pack.data[i].data(), slots[i].bytes);
  }
  return transmit_parts(peer, head, frames);
}

std::string ZmqAgent::transmit_parts(Peer& peer, ZmqMessage& head,
                                     std::vector<torch::jit::WriteableTensorData>& frames) {
  std::lock_guard<std::mutex> guard(peer.mutex);
  if (!peer.gone.empty() || !peer.socket) {
    zmq_.msg_close(&head);
    return peer.gone;
  }
  int flags = kDontWait | (frames.empty() ? 0 : kSendMore);
  if (zmq_.msg_send(&head, peer.socket, flags) < 0) {
    zmq_.msg_close(&head);
    return "cannot send to worker '" + peer.info.name_ + "': " + zmq_.error();
  }
  for (std::size_t i = 0; i < frames.size(); i++) {
    auto* kept = new torch::jit::WriteableTensorData(frames[i]);
    ZmqMessage frame;
    zmq_.msg_init_data(&frame, const_cast<char*>(kept->data()), kept->sizeInBytes(), release_data,
                       kept);
    zmq_.msg_send(&frame, peer.socket, kDontWait | (i + 1 < frames.size() ? kSendMore : 0));
  }
  return "";
}

void ZmqAgent::respond(const std::shared_ptr<Peer>& peer, uint64_t call, int64_t message_id,
                       rpc::JitFuture& result) {
  rpc::DeviceMap map;
  {
    std::lock_guard<std::mutex> guard(devices_mutex_);
    auto found = reverse_.find(peer->info.name_);
    if (found != reverse_.end()) map = found->second;
  }
  std::string problem;
  try {
    auto message = result.hasError()
                       ? rpc::createExceptionResponse(result.tryRetrieveErrorMessage(), message_id)
                       : result.value().toCustomClass<Message>();
    message->setId(message_id);
    transmit(*peer, Kind::kResponse, call, *message, map);
    return;
  } catch (const std::exception& error) {
    problem = error.what();
  }
  auto message = rpc::createExceptionResponse(
      "worker '" + getWorkerInfo().name_ + "' cannot send its answer: " + problem, message_id);
  transmit(*peer, Kind::kResponse, call, *message, {});
}

}  // namespace rankcall
