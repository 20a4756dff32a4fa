// Receiving: what comes is checked, turned into messages and handled.
#include "agent.h"

namespace rankcall {

// The socket that has something to read; null once there will be nothing more.
void* ZmqAgent::readable() const {
  if (!network_) return local_;
  ZmqPollItem items[] = {{local_, 0, kPollIn, 0}, {network_, 0, kPollIn, 0}};
  if (zmq_.poll(items, 2, -1) < 0) return nullptr;
  return items[0].revents ? local_ : network_;
}

bool ZmqAgent::receive() {
  void* socket = readable();
  auto incoming = std::make_shared<Incoming>();
  incoming->head = std::make_shared<Frame>(zmq_);
  if (!socket || zmq_.msg_recv(incoming->head->get(), socket, 0) < 0)
    return !stopping_ && zmq_.zmq_errno() != kEterm;
  bool bounded = true;
  for (bool more = incoming->head->more(); more;) {
    auto frame = std::make_shared<Frame>(zmq_);
    if (zmq_.msg_recv(frame->get(), socket, 0) < 0) return zmq_.zmq_errno() != kEterm;
    more = frame->more();
    bounded = bounded && incoming->frames.size() < kMaxBuffers;
    if (bounded) incoming->frames.push_back(std::move(frame));
  }
  std::vector<std::size_t> sizes;
  for (const auto& frame : incoming->frames) sizes.push_back(frame->size());
  try {
    if (!bounded) throw WireError("too many frames");
    incoming->parsed = parse(incoming->head->data(), incoming->head->size(), sizes);
  } catch (const WireError&) {
    counters_.malformed++;
    return true;
  }
  dispatch(std::move(incoming));
  return true;
}

void ZmqAgent::dispatch(std::shared_ptr<Incoming> incoming) {
  const Header& header = incoming->parsed.header;
  if (header.to_session != settings_.session) {
    counters_.stale++;
    return;
  }
  auto kind = Kind(header.kind);
  auto peer = peers_.find(rpc::worker_id_t(header.from));
  bool known = peer && peer->session == header.from_session;
  if (!known && kind != Kind::kControl) {
    counters_.strangers++;
    return;
  }
  if (kind == Kind::kResponse || kind == Kind::kControlReply) {
    crew_.answer([this, incoming] { handle_answer(*incoming); });
  } else if (kind == Kind::kBye) {
    crew_.answer([this, peer] { lose(peer, "worker '" + peer->info.name_ + "' has left"); });
  } else if (kind == Kind::kRequest) {
    crew_.request([this, peer, incoming] { handle_request(peer, *incoming); });
  } else {
    crew_.answer([this, peer, incoming] { handle_control(peer, *incoming); });
  }
}

Buffer ZmqAgent::buffer_of(Peer& peer, Incoming& incoming, std::size_t index, std::size_t frame) {
  const Slot& slot = incoming.parsed.slots[index];
  auto cpu = at::Device(at::kCPU);
  if (slot.where == uint32_t(Where::kPacked)) {
    auto data = c10::GetAllocator(c10::kCPU)->allocate(slot.bytes);
    if (slot.bytes) std::memcpy(data.get(), incoming.parsed.packed[index], slot.bytes);
    return {std::move(data), slot.bytes};
  }
  if (slot.where == uint32_t(Where::kFrame)) {
    auto* kept = new std::shared_ptr<Frame>(incoming.frames[frame]);
    auto release = [](void* frame) { delete static_cast<std::shared_ptr<Frame>*>(frame); };
    return {at::DataPtr((*kept)->data(), kept, release, cpu), slot.bytes};
  }
  auto block = attachments_.get(peer.arena, slot.block);
  if (!block || slot.bytes > block->capacity())
    throw WireError("worker '" + peer.info.name_ + "' names shared memory that is not there");
  auto* kept = new std::shared_ptr<Block>(block);
  auto release = [](void* held) {
    auto* block = static_cast<std::shared_ptr<Block>*>(held);
    (*block)->free();
    delete block;
  };
  return {at::DataPtr(block->data(), kept, release, cpu), slot.bytes};
}

c10::intrusive_ptr<Message> ZmqAgent::message_of(Peer& peer, Incoming& incoming) {
  const Parsed& parsed = incoming.parsed;
  std::vector<Buffer> buffers;
  std::size_t frame = 0;
  for (std::size_t i = 0; i < parsed.slots.size(); i++) {
    buffers.push_back(buffer_of(peer, incoming, i, frame));
    frame += parsed.slots[i].where == uint32_t(Where::kFrame);
  }
  const Header& header = parsed.header;
  auto tensors = unpack(parsed.pickle, header.pickle_bytes, std::move(buffers), parsed.tags);
  std::vector<char> payload(parsed.payload, parsed.payload + header.payload_bytes);
  return c10::make_intrusive<Message>(std::move(payload), std::move(tensors),
                                      MessageType(header.type), header.message_id);
}

void ZmqAgent::handle_request(const std::shared_ptr<Peer>& peer, Incoming& incoming) {
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
  result->addCallback([this, peer, header](rpc::JitFuture& result) {
    respond(peer, header.call, header.message_id, result);
    serving_--;
  });
}

void ZmqAgent::handle_answer(Incoming& incoming) {
  const Header& header = incoming.parsed.header;
  auto call = calls_.take(header.call);
  if (!call) {
    counters_.late_answers++;
    return;
  }
  std::string problem;
  try {
    auto message = message_of(*call->peer, incoming);
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
  fail(std::move(*call), "the answer cannot be read: " + problem,
       rpc::RPCErrorType::UNKNOWN_ERROR);
}

void ZmqAgent::handle_control(const std::shared_ptr<Peer>& peer, Incoming& incoming) {
  const Header& header = incoming.parsed.header;
  std::string reply;
  bool failed = false;
  {
    py::gil_scoped_acquire gil;
    try {
      py::object call = on_control_;
      if (!call) return;
      reply = py::cast<std::string>(
          call(header.from, py::bytes(incoming.parsed.payload, header.payload_bytes)));
    } catch (py::error_already_set& error) {
      reply = error.what();
      failed = true;
    }
  }
  auto to = peers_.find(rpc::worker_id_t(header.from));
  if (!to || to->session != header.from_session) {  // not even now
    counters_.strangers++;
    return;
  }
  auto message = c10::make_intrusive<Message>(std::vector<char>(reply.begin(), reply.end()),
                                              std::vector<at::Tensor>{},
                                              failed ? MessageType::EXCEPTION
                                                     : MessageType::UNKNOWN);
  transmit(*to, Kind::kControlReply, header.call, *message, {});
}

}  // namespace rankcall
