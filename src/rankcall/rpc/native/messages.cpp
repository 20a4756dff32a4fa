// How messages are sent and received.
#include "agent.h"

namespace rankcall {
namespace {

// The connection for a refusal is kept for so long, as the peer may be stopped.
constexpr std::chrono::seconds kRefusalTime{10};

// The receiver would close the connection, and lose whatever else is on it.
void check_size(const char* what, std::size_t bytes, const Peer& peer) {
  TORCH_CHECK(int64_t(bytes) <= peer.max_bytes, what, " of ", bytes, " bytes is more than worker '",
              peer.info.name_, "' accepts: its max_message_bytes is ", peer.max_bytes);
}

c10::intrusive_ptr<Message> text_message(const std::string& text, MessageType type) {
  return c10::make_intrusive<Message>(std::vector<char>(text.begin(), text.end()),
                                      std::vector<at::Tensor>{}, type);
}

Future failed(const std::string& why) {
  auto future = c10::make_intrusive<rpc::JitFuture>(at::AnyClassType::get());
  future->setError(std::make_exception_ptr(
      std::runtime_error(rpc::makeRPCError(why, rpc::RPCErrorType::UNKNOWN_ERROR))));
  return future;
}

void free_block(void* block) { delete static_cast<BlockInUse*>(block); }

std::string text_of(const Parsed& parsed) {
  return {parsed.payload, std::size_t(parsed.header.payload_bytes)};
}

Bytes head_of(Header header, const std::vector<Slot>& slots, const TensorPack& pack,
              const Message& message) {
  const auto& payload = message.payload();
  std::size_t size = sizeof header + slots.size() * sizeof(Slot) +
                     pack.tags.size() * sizeof(DeviceTag) + payload.size() + pack.pickle.size();
  for (const Slot& slot : slots)
    if (slot.where == uint32_t(Where::kPacked)) size += slot.bytes;
  header.payload_bytes = payload.size();
  header.pickle_bytes = pack.pickle.size();
  header.buffers = uint32_t(slots.size());
  header.tensors = uint32_t(pack.tags.size());
  std::shared_ptr<char[]> head(new char[size]);
  char* at = head.get();
  auto put = [&](const void* data, std::size_t bytes) {
    if (bytes) std::memcpy(at, data, bytes);
    at += bytes;
  };
  put(&header, sizeof header);
  put(slots.data(), slots.size() * sizeof(Slot));
  put(pack.tags.data(), pack.tags.size() * sizeof(DeviceTag));
  put(payload.data(), payload.size());
  put(pack.pickle.data(), pack.pickle.size());
  for (std::size_t i = 0; i < slots.size(); i++)
    if (slots[i].where == uint32_t(Where::kPacked)) put(pack.storages[i].data(), slots[i].bytes);
  return {head.get(), size, head};
}

}  // namespace

// Sending.

Future ZmqAgent::send(const rpc::WorkerInfo& to, c10::intrusive_ptr<Message> message,
                      const float timeout_s, const rpc::DeviceMap& device_map) {
  TORCH_CHECK(!is_forked_copy_, "RPC does not work in a forked child: the threads of worker '",
              getWorkerInfo().name_, "' are in the parent process. Call from the parent, or start "
              "the child by spawning");
  TORCH_CHECK(rpcAgentRunning_.load(), "Node ", getWorkerInfo().id_,
              " tried to send() a message of type ", message->type(),
              " but RPC is no longer running on this node.");
  auto peer = peers_.find_id(to.id_);
  if (!peer || peer->info.name_ != to.name_)
    return failed("worker '" + to.name_ + "' is not, or no longer, in the group");
  auto map = device_map.empty() ? getDeviceMap(to) : device_map;
  return call(peer, Kind::kRequest, *message, timeout_s, map, at::AnyClassType::get());
}

Future ZmqAgent::control(const std::string& to, const std::string& payload, float timeout_s) {
  auto peer = peers_.find_name(to);
  TORCH_CHECK(peer, "could not find destination: there is no worker '", to, "' in the group");
  auto message = text_message(payload, MessageType::UNKNOWN);
  return call(peer, Kind::kControl, *message, timeout_s, {}, c10::StringType::get());
}

Future ZmqAgent::call(const std::shared_ptr<Peer>& peer, Kind kind, Message& message,
                      float timeout_s, const rpc::DeviceMap& map, c10::TypePtr type) {
  auto timeout = timeout_s == rpc::kUnsetRpcTimeout
                     ? getRpcTimeout()
                     : milliseconds(timeout_s);
  // 0 would mean no timeout, and the user asked for a very short one.
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

// The block of a storage that came from the peer, if nothing else in this process can use it. Then
// it goes back without a copy, and the storage is empty.
BlockInUse ZmqAgent::take_back(Peer& peer, const c10::Storage& storage) {
  if (storage.use_count() != 1 || storage.data_ptr().get_deleter() != &free_block) return {};
  // use_count() is a relaxed load. Another thread may have written to the storage before it gave up
  // its reference; the fence puts those writes before the block is sent.
  std::atomic_thread_fence(std::memory_order_acquire);
  auto& block = *static_cast<BlockInUse*>(storage.data_ptr().get_context());
  bool is_of_peer = peer.is_local() && block.is_in(others_slabs_.get(peer.slabs, block.slab_id()));
  return is_of_peer ? std::move(block) : BlockInUse();
}

// Decides for each buffer how it travels: a small one in the head, and a large one in the block that
// it came in, in a new block, or else as a part of the message, which needs no room in /dev/shm.
std::vector<Slot> ZmqAgent::place(Peer& peer, const TensorPack& pack, std::vector<Bytes>& parts,
                                  std::vector<BlockInUse>& blocks) {
  TORCH_CHECK(pack.storages.size() <= kMaxBuffers && pack.tags.size() <= kMaxBuffers,
              "a message to worker '", peer.info.name_, "' has ", pack.tags.size(),
              " tensors; the most is ", kMaxBuffers);
  std::vector<Slot> slots;
  for (const c10::Storage& storage : pack.storages) {
    Slot slot{uint32_t(Where::kPacked), 0, storage.nbytes(), 0, 0};
    if (slot.bytes >= kLarge) {
      auto where = Where::kReturned;
      BlockInUse block = take_back(peer, storage);
      if (!block && peer.is_local()) {
        where = Where::kShared;
        block = own_slabs_.take(slot.bytes, peer.session);
        if (block) copy_(block.data(), static_cast<const char*>(storage.data()), slot.bytes);
      }
      if (block) {
        slot = {uint32_t(where), block.block(), slot.bytes, block.slab_id(), block.generation()};
        blocks.push_back(std::move(block));
      } else {
        check_size("a tensor", slot.bytes, peer);
        slot.where = uint32_t(Where::kPart);
        auto owner = std::make_shared<c10::Storage>(storage);
        parts.push_back({static_cast<const char*>(owner->data()), owner->nbytes(), owner});
      }
    }
    slots.push_back(slot);
  }
  return slots;
}

// Returns why the message could not be sent, or nothing.
std::string ZmqAgent::transmit(Peer& peer, Kind kind, uint64_t call, Message& message,
                               const rpc::DeviceMap& map) {
  TensorPack pack = rankcall::pack(message.tensors(), map, peer.info.name_);
  if (kind == Kind::kResponse) message.tensors().clear();  // so that take_back sees other users
  std::vector<Bytes> parts(1);
  // Freed again if the message is not sent. Once it is, the receiver frees them.
  std::vector<BlockInUse> blocks;
  std::vector<Slot> slots = place(peer, pack, parts, blocks);
  Header header{};
  header.magic = kMagic;
  header.kind = uint8_t(kind);
  header.from_session = settings_.session;
  header.to_session = peer.session;
  header.call = call;
  header.message_id = message.id();
  header.type = int32_t(message.type());
  parts.front() = head_of(header, slots, pack, message);
  check_size("a message", parts.front().size, peer);
  std::string problem = deliver(peer, kind == Kind::kRefusal, parts);
  if (problem.empty())
    for (auto& block : blocks) block.hand_on();
  return problem;
}

std::string ZmqAgent::transmit_text(Peer& peer, Kind kind, uint64_t call, const std::string& text,
                                    MessageType type) {
  return transmit(peer, kind, call, *text_message(text, type), {});
}

// Queues a message, connecting first if need be. A peer that is gone is sent nothing but a refusal.
std::string ZmqAgent::deliver(Peer& peer, bool is_refusal, const std::vector<Bytes>& parts) {
  std::lock_guard<std::mutex> guard(connections_mutex_);
  if (is_closed_) return "RPC is no longer running here";
  if (!peer.gone.empty() && !is_refusal) return peer.gone;
  try {
    if (peer.route.empty()) open_connection(peer);
  } catch (const std::runtime_error& error) {
    return "worker '" + peer.info.name_ + "' cannot be called: " + error.what();
  }
  if (is_refusal) peer.close_at = Clock::now() + kRefusalTime;
  return peer.is_local() ? sockets_.send(peer.route, parts) : deliver_chunks(peer, parts);
}

// With connections_mutex_ held: a transfer's chunks follow each other.
std::string ZmqAgent::deliver_chunks(Peer& peer, const std::vector<Bytes>& parts) {
  Chunk chunk{kChunkMagic, 0, settings_.session, ++transfers_, 0, 0};
  for (; chunk.part < parts.size(); chunk.part++) {
    const Bytes& part = parts[chunk.part];
    chunk.bytes = part.size;
    chunk.offset = 0;
    do {
      std::size_t size = std::min<std::size_t>(kChunkBytes, part.size - chunk.offset);
      Bytes header{reinterpret_cast<const char*>(&chunk), sizeof chunk, nullptr};
      auto problem = sockets_.send(peer.route, {header, {part.data + chunk.offset, size, part.owner}});
      if (!problem.empty()) return problem;
      chunk.offset += size;
    } while (chunk.offset < part.size);
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
                       ? rpc::createExceptionResponse("On worker '" + getWorkerInfo().name_ + "': " +
                                                          result.tryRetrieveErrorMessage(),
                                                      message_id)
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

// Receiving.

bool ZmqAgent::receive() {
  std::vector<Bytes> frames;
  if (!sockets_.receive(frames)) return false;
  if (frames.empty()) return !stopping_;
  try {
    decode(std::move(frames));
  } catch (const WireError&) {
    counters_.malformed++;
  } catch (const std::bad_alloc&) {
    counters_.malformed++;
  }
  return true;
}

void ZmqAgent::decode(std::vector<Bytes> frames) {
  auto chunk = parse_chunk(frames[0].data, frames[0].size);
  if (!chunk) {
    Bytes head = std::move(frames.front());
    frames.erase(frames.begin());
    dispatch(std::make_shared<Incoming>(parse_message(std::move(head), std::move(frames))));
    return;
  }
  if (frames.size() != 2) throw WireError("a chunk has one frame of data");
  auto peer = peers_.find_session(chunk->session);
  bool known = peer && reason_gone(*peer).empty();
  if (auto whole = assembler_.add(*chunk, frames[1].data, frames[1].size, known))
    dispatch(std::make_shared<Incoming>(std::move(*whole)));
}

void ZmqAgent::dispatch(std::shared_ptr<Incoming> incoming) {
  const Header& header = incoming->parsed.header;
  if (header.to_session != settings_.session) {
    counters_.stale++;
    return;
  }
  auto kind = Kind(header.kind);
  auto peer = peers_.find_session(header.from_session);
  if (!peer && kind != Kind::kControl) {
    counters_.strangers++;
    return;
  }
  bool is_answer = kind == Kind::kResponse || kind == Kind::kControlReply;
  if (peer) peer->was_heard = true;
  if (kind == Kind::kFarewell || kind == Kind::kRefusal) {
    auto why = text_of(incoming->parsed);
    auto loss = kind == Kind::kFarewell ? Loss::kLeft : Loss::kGaveUp;
    pool_.add_answer([this, peer, why, loss] { lose(peer, why, loss); });
  } else if (peer && !reason_gone(*peer).empty()) {
    (is_answer ? counters_.late_answers : counters_.given_up)++;
    if (!is_answer) pool_.add_answer([this, peer] { refuse(peer); });
  } else if (is_answer) {
    pool_.add_answer([this, peer, incoming] { handle_answer(peer, *incoming); });
  } else if (kind == Kind::kRequest) {
    pool_.add_request([this, peer, incoming] { handle_request(peer, *incoming); });
  } else {
    pool_.add_answer([this, incoming] { handle_control(*incoming); });
  }
}

Buffer ZmqAgent::shared_buffer(Peer& peer, const Slot& slot) {
  std::shared_ptr<Slab> slab;
  if (slot.where == uint32_t(Where::kReturned))
    slab = own_slabs_.find(slot.slab, peer.session);
  else if (peer.is_local())
    slab = others_slabs_.get(peer.slabs, slot.slab);
  if (!slab || !slab->holds(slot.block, slot.generation, slot.bytes))
    throw WireError("worker '" + peer.info.name_ + "' names shared memory that is not there");
  char* data = slab->data(slot.block);
  auto* kept = new BlockInUse(std::move(slab), slot.slab, slot.block, slot.generation);
  return {at::DataPtr(data, kept, &free_block, at::Device(at::kCPU)), slot.bytes};
}

// Returns the memory of all buffers. It is freed with the result unless a tensor takes it over.
std::vector<Buffer> ZmqAgent::buffers_of(Peer& peer, Incoming& incoming) {
  std::vector<Buffer> buffers;
  std::size_t part = 0;
  for (std::size_t i = 0; i < incoming.parsed.slots.size(); i++) {
    const Slot& slot = incoming.parsed.slots[i];
    if (slot.where >= uint32_t(Where::kShared)) {
      buffers.push_back(shared_buffer(peer, slot));
    } else if (slot.where == uint32_t(Where::kPart)) {
      auto* kept = new Bytes(std::move(incoming.parts[part++]));
      auto release = [](void* bytes) { delete static_cast<Bytes*>(bytes); };
      at::DataPtr data(const_cast<char*>(kept->data), kept, release, at::Device(at::kCPU));
      buffers.push_back({std::move(data), slot.bytes});
    } else {
      auto data = c10::GetAllocator(c10::kCPU)->allocate(slot.bytes);
      if (slot.bytes) std::memcpy(data.get(), incoming.parsed.packed[i], slot.bytes);
      buffers.push_back({std::move(data), slot.bytes});
    }
  }
  return buffers;
}

c10::intrusive_ptr<Message> ZmqAgent::message_of(Peer& peer, Incoming& incoming) {
  const Parsed& parsed = incoming.parsed;
  const Header& header = parsed.header;
  auto tensors =
      unpack(parsed.pickle, header.pickle_bytes, buffers_of(peer, incoming), parsed.tags);
  std::vector<char> payload(parsed.payload, parsed.payload + header.payload_bytes);
  return c10::make_intrusive<Message>(std::move(payload), std::move(tensors),
                                      MessageType(header.type), header.message_id);
}

void ZmqAgent::handle_request(const std::shared_ptr<Peer>& peer, Incoming& incoming) {
  if (!reason_gone(*peer).empty()) {  // given up since the request arrived
    counters_.given_up++;
    refuse(peer);
    return;
  }
  const Header header = incoming.parsed.header;
  serving_++;
  Future result;
  try {
    auto request = message_of(*peer, incoming);
    TORCH_CHECK(request->isRequest(), "worker '", peer->info.name_, "' sent no request");
    result = (*cb_)(*request, {});
  } catch (const std::exception& error) {
    counters_.malformed++;
    result = c10::make_intrusive<rpc::JitFuture>(at::AnyClassType::get());
    result->setError(std::make_exception_ptr(std::runtime_error(error.what())));
  }
  // The future may complete after the end of the agent, for example if the user keeps it.
  result->addCallback([self = shared_from_this(), peer, header](rpc::JitFuture& result) {
    self->respond(peer, header.call, header.message_id, result);
    self->serving_--;
  });
}

void ZmqAgent::handle_answer(const std::shared_ptr<Peer>& peer, Incoming& incoming) {
  const Header& header = incoming.parsed.header;
  auto call = calls_.take(header.call);
  std::string problem;
  try {
    if (!call) {
      counters_.late_answers++;
      buffers_of(*peer, incoming);  // frees the shared memory that the answer is in
      return;
    }
    auto message = message_of(*peer, incoming);
    const auto& payload = message->payload();
    if (message->type() == MessageType::EXCEPTION) {
      call->future->setError(std::make_exception_ptr(
          std::runtime_error(std::string(payload.begin(), payload.end()))));
    } else if (Kind(header.kind) == Kind::kControlReply) {
      call->future->markCompleted(std::string(payload.begin(), payload.end()));
    } else {
      auto storages = message->getStorages();
      call->future->markCompleted(std::move(message), std::move(storages));
    }
    calls_.ended();
    return;
  } catch (const std::exception& error) {
    problem = error.what();
  }
  if (!call) return;
  fail(std::move(*call), "the answer cannot be read: " + problem,
       rpc::RPCErrorType::UNKNOWN_ERROR);
}

void ZmqAgent::handle_control(Incoming& incoming) {
  const Header& header = incoming.parsed.header;
  std::string reply;
  bool has_failed = false;
  {
    py::gil_scoped_acquire gil;
    try {
      py::object call = on_control_;
      if (!call) return;
      reply = py::cast<std::string>(call(py::bytes(text_of(incoming.parsed))));
    } catch (py::error_already_set& error) {
      reply = error.what();
      has_failed = true;
    }
  }
  auto peer = peers_.find_session(header.from_session);
  if (!peer) {  // not even now
    counters_.strangers++;
    return;
  }
  transmit_text(*peer, Kind::kControlReply, header.call, reply,
                has_failed ? MessageType::EXCEPTION : MessageType::UNKNOWN);
}

}  // namespace rankcall
