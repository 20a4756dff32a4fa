#include "agent.h"

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <csignal>

namespace rankcall {

using rpc::Message;
using rpc::MessageType;

namespace {

uint64_t milliseconds(float seconds) { return uint64_t(seconds * 1000); }

void close_quietly(const Zmq& zmq, void*& socket, int linger_ms) {
  if (!socket) return;
  zmq.set(socket, kLinger, linger_ms);
  zmq.close(socket);
  socket = nullptr;
}

// Keeps what a sent frame's bytes belong to until ZeroMQ has sent them.
void release_data(void*, void* kept) {
  delete static_cast<torch::jit::WriteableTensorData*>(kept);
}

}  // namespace

// --- set-up

ZmqAgent::ZmqAgent(const std::string& name, int64_t id, float timeout_s, Settings settings)
    : rpc::RpcAgent(rpc::WorkerInfo(name, id), std::make_unique<rpc::RequestCallbackImpl>(),
                    std::chrono::milliseconds(milliseconds(timeout_s))),
      zmq_(load_zmq(settings.library)),
      settings_(std::move(settings)) {
  context_ = zmq_.ctx_new();
  TORCH_CHECK(context_, "ZeroMQ gives no context: ", zmq_.error());
  zmq_.ctx_set(context_, kMaxSockets, 16384);
}

ZmqAgent::~ZmqAgent() {
  if (started_ && !stopping_) shutdownImpl();
  if (zmq_.ctx_shutdown(context_) == 0) {
    close_sockets();
    zmq_.ctx_term(context_);
  }
  py::gil_scoped_acquire gil;
  on_join_ = on_control_ = on_lost_ = on_close_ = py::object();
}

void ZmqAgent::bind_local(const std::string& path) {
  local_ = zmq_.socket(context_, kPull);
  zmq_.set(local_, kRcvHwm, 0);
  zmq_.setsockopt(local_, kMaxMsgSize, &settings_.max_bytes, sizeof settings_.max_bytes);
  TORCH_CHECK(zmq_.bind(local_, path.c_str()) == 0, "cannot listen at ", path, ": ", zmq_.error());
}

std::string ZmqAgent::bind_network(const std::string& endpoint) {
  network_ = zmq_.socket(context_, kPull);
  zmq_.set(network_, kRcvHwm, 0);
  zmq_.setsockopt(network_, kMaxMsgSize, &settings_.max_bytes, sizeof settings_.max_bytes);
  zmq_.set(network_, kHeartbeatIvl, settings_.heartbeat_timeout_ms / 4);
  zmq_.set(network_, kHeartbeatTimeout, settings_.heartbeat_timeout_ms);
  if (!keys_.server_secret.empty()) {
    zap_ = zmq_.socket(context_, kRep);  // before the socket it speaks for
    TORCH_CHECK(zmq_.bind(zap_, "inproc://zeromq.zap.01") == 0, zmq_.error());
    zmq_.set(network_, kCurveServer, 1);
    zmq_.set(network_, kCurveSecretKey, keys_.server_secret);
    zmq_.set(network_, kZapDomain, std::string("rankcall"));
  }
  open_monitor(network_, "network", kHandshakeFailed, network_monitor_);
  TORCH_CHECK(zmq_.bind(network_, endpoint.c_str()) == 0, "cannot listen at ", endpoint, ": ",
              zmq_.error());
  char bound[256];
  std::size_t size = sizeof bound;
  zmq_.getsockopt(network_, kLastEndpoint, bound, &size);
  return bound;
}

void ZmqAgent::open_monitor(void* socket, const std::string& name, int events, void*& monitor) {
  std::string address = "inproc://monitor-" + name;
  zmq_.socket_monitor(socket, address.c_str(), events);
  monitor = zmq_.socket(context_, kPair);
  zmq_.set(monitor, kLinger, 0);
  zmq_.connect(monitor, address.c_str());
}

void ZmqAgent::add_peer(std::shared_ptr<Peer> peer, const std::string& endpoint) {
  const std::string& name = peer->info.name_;
  if (auto former = peers_.find(name); former && former->session == peer->session) return;
  else if (former) lose(former, "worker '" + name + "' is gone: it has started anew");
  void* socket = zmq_.socket(context_, kPush);
  TORCH_CHECK(socket, "no socket for worker '", peer->info.name_, "': ", zmq_.error());
  zmq_.set(socket, kSndHwm, 0);
  zmq_.set(socket, kLinger, 0);
  zmq_.set(socket, kReconnectIvl, 50);
  zmq_.set(socket, kHeartbeatIvl, settings_.heartbeat_timeout_ms / 4);
  zmq_.set(socket, kHeartbeatTimeout, settings_.heartbeat_timeout_ms);
  if (endpoint.starts_with("tcp://") && !keys_.client_secret.empty()) {
    zmq_.set(socket, kCurveServerKey, keys_.server_public);
    zmq_.set(socket, kCurvePublicKey, keys_.client_public);
    zmq_.set(socket, kCurveSecretKey, keys_.client_secret);
  }
  open_monitor(socket, std::to_string(peer->session), kDisconnected | kHandshakeSucceeded,
               peer->monitor);
  peer->socket = socket;
  TORCH_CHECK(zmq_.connect(socket, endpoint.c_str()) == 0, "cannot connect to ", endpoint, ": ",
              zmq_.error());
  peers_.add(std::move(peer));
}

void ZmqAgent::set_devices(std::unordered_map<std::string, rpc::DeviceMap> maps,
                           std::unordered_map<std::string, rpc::DeviceMap> reverse,
                           std::vector<c10::Device> devices) {
  std::lock_guard<std::mutex> guard(devices_mutex_);
  maps_ = std::move(maps);
  reverse_ = std::move(reverse);
  if (devices != devices_.back()) devices_.push_back(std::move(devices));
}

// --- what torch asks

const rpc::WorkerInfo& ZmqAgent::getWorkerInfo(const std::string& name) const {
  auto peer = peers_.find(name);
  TORCH_CHECK(peer, "could not find destination: there is no worker '", name, "' in the group");
  return peer->info;
}

const rpc::WorkerInfo& ZmqAgent::getWorkerInfo(rpc::worker_id_t id) const {
  auto peer = peers_.find(id);
  TORCH_CHECK(peer, "could not find destination: there is no worker with id ", id, " in the group");
  return peer->info;
}

std::vector<rpc::WorkerInfo> ZmqAgent::getWorkerInfos() const {
  std::vector<rpc::WorkerInfo> infos;
  for (const auto& peer : peers_.members()) infos.push_back(peer->info);
  return infos;
}

rpc::DeviceMap ZmqAgent::getDeviceMap(const rpc::WorkerInfo& to) const {
  std::lock_guard<std::mutex> guard(devices_mutex_);
  auto found = maps_.find(to.name_);
  return found == maps_.end() ? rpc::DeviceMap{} : found->second;
}

const std::vector<c10::Device>& ZmqAgent::getDevices() const {
  std::lock_guard<std::mutex> guard(devices_mutex_);
  return devices_.back();
}

void ZmqAgent::join(bool shutdown, float timeout_s) {
  py::gil_scoped_acquire gil;
  if (on_join_) on_join_(shutdown, timeout_s);
}

std::unordered_map<std::string, std::string> ZmqAgent::getMetrics() {
  auto text = [](auto number) { return std::to_string(number); };
  auto [started, ended] = counts();
  std::unordered_map<std::string, std::string> metrics{
      {"agent.client_active_calls", text(started - ended)},
      {"agent.server_active_calls", text(serving_.load())},
      {"agent.thread_pool_size", text(crew_.threads())},
      {"agent.num_idle_threads", text(crew_.idle())},
      {"agent.arena_bytes", text(arena_.total())},
      {"agent.malformed", text(counters_.malformed.load())},
      {"agent.stale", text(counters_.stale.load())},
      {"agent.strangers", text(counters_.strangers.load())},
      {"agent.refused", text(counters_.refused.load())},
      {"agent.late_answers", text(counters_.late_answers.load())},
  };
  if (isGILProfilingEnabled()) {
    int64_t waits = std::max<int64_t>(gil_waits_, 1);
    metrics["agent.gil_average_wait_time_us"] = text(double(gil_wait_us_) / double(waits));
  }
  return metrics;
}

void ZmqAgent::startImpl() {
  started_ = true;
  crew_.start(settings_.threads, [this] { return receive(); });
  deadlines_thread_ = std::thread([this] { watch_deadlines(); });
  peers_thread_ = std::thread([this] { watch_peers(); });
}

void ZmqAgent::shutdownImpl() {
  if (stopping_.exchange(true)) return;
  auto bye = c10::make_intrusive<Message>(std::vector<char>{}, std::vector<at::Tensor>{},
                                          MessageType::UNKNOWN);
  for (const auto& peer : peers_.members()) transmit(*peer, Kind::kBye, 0, *bye, {});
  for (auto& call : calls_.take_all(nullptr))
    fail(std::move(call), "RPC is shutting down on worker '" + getWorkerInfo().name_ + "'",
         rpc::RPCErrorType::UNKNOWN_ERROR);
  calls_.close();
  for (const auto& peer : peers_.ever()) {
    std::lock_guard<std::mutex> guard(peer->mutex);
    if (peer->gone.empty()) zmq_.set(peer->socket, kLinger, 500);
  }
  zmq_.ctx_shutdown(context_);
  deadlines_thread_.join();
  peers_thread_.join();
  if (!crew_.stop(std::chrono::seconds(5))) {
    // A request does not come to an end. Its thread will look for this agent when it does.
    static std::vector<std::shared_ptr<rpc::RpcAgent>> kept;
    kept.push_back(rpc::RpcAgent::getCurrentRpcAgent());
  }
  close_sockets();
  py::gil_scoped_acquire gil;
  if (on_close_) on_close_();
}

void ZmqAgent::close_sockets() {
  for (const auto& peer : peers_.ever()) {
    std::lock_guard<std::mutex> guard(peer->mutex);
    if (peer->gone.empty()) peer->gone = "RPC is no longer running here";
    if (peer->socket) zmq_.close(peer->socket);
    peer->socket = nullptr;
    close_quietly(zmq_, peer->monitor, 0);
  }
  for (void** socket : {&local_, &network_, &network_monitor_, &zap_})
    close_quietly(zmq_, *socket, 0);
}

// --- sending

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
                     : std::chrono::milliseconds(milliseconds(timeout_s));
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
        TORCH_CHECK(int64_t(slot.bytes) <= settings_.max_bytes, "a tensor of ", slot.bytes,
                    " bytes to worker '", peer.info.name_, "' is over the limit of ",
                    settings_.max_bytes, " (max_message_bytes)");
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
  TORCH_CHECK(int64_t(size) <= settings_.max_bytes, "a message of ", size, " bytes to worker '",
              peer.info.name_, "' is over the limit of ", settings_.max_bytes,
              " (max_message_bytes)");
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

// --- receiving

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
      if (!on_control_) return;
      reply = py::cast<std::string>(
          on_control_(header.from, py::bytes(incoming.parsed.payload, header.payload_bytes)));
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

// --- ends of calls

void ZmqAgent::fail(Call call, const std::string& why, rpc::RPCErrorType type) {
  call.future->setError(
      std::make_exception_ptr(std::runtime_error(rpc::makeRPCError(why, type))));
  calls_.ended();
}

void ZmqAgent::watch_deadlines() {
  PythonThread python;
  pthread_setname_np(pthread_self(), "rankcall-rpc-t");
  while (!stopping_) {
    for (auto& call : calls_.take_overdue()) {
      auto ms = std::to_string(call.timeout.count());
      std::string why = "RPC ran for more than set timeout (" + ms +
                        " ms) and will now be marked with an error: worker '" +
                        call.peer->info.name_ + "' has not answered";
      auto shared = std::make_shared<Call>(std::move(call));
      crew_.answer([this, shared, why] {
        fail(std::move(*shared), why, rpc::RPCErrorType::TIMEOUT);
      });
    }
  }
}

// Take a worker for gone, for good: what waits for it fails now, and what is sent to it at once.
void ZmqAgent::lose(const std::shared_ptr<Peer>& peer, const std::string& why) {
  {
    std::lock_guard<std::mutex> guard(peer->mutex);
    if (!peer->gone.empty()) return;
    peer->gone = why;
    zmq_.socket_monitor(peer->socket, nullptr, 0);
    close_quietly(zmq_, peer->socket, 0);
  }
  arena_.reclaim(peer->info.id_);
  if (!peer->arena.empty()) attachments_.forget(peer->arena);
  for (auto& call : calls_.take_all(peer))
    fail(std::move(call), why, rpc::RPCErrorType::UNKNOWN_ERROR);
  if (stopping_) return;
  py::gil_scoped_acquire gil;
  try {
    if (on_lost_) on_lost_(peer->info.name_, peer->session, why);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("rankcall.rpc: a lost worker");
  }
}

std::unordered_map<std::string, std::string> ZmqAgent::gone() const {
  std::unordered_map<std::string, std::string> gone;
  for (const auto& peer : peers_.members()) {
    std::lock_guard<std::mutex> guard(peer->mutex);
    if (!peer->gone.empty()) gone[peer->info.name_] = peer->gone;
  }
  return gone;
}

void ZmqAgent::watch_peers() {
  PythonThread python;
  pthread_setname_np(pthread_self(), "rankcall-rpc-w");
  while (!stopping_) poll_peers();
}

void ZmqAgent::poll_peers() {
  std::vector<std::shared_ptr<Peer>> peers;
  std::vector<ZmqPollItem> items;
  for (const auto& peer : peers_.members()) {
    if (!peer->monitor) continue;
    peers.push_back(peer);
    items.push_back({peer->monitor, 0, kPollIn, 0});
  }
  std::size_t first_own = items.size();
  for (void* own : {network_monitor_, zap_}) {
    if (own) items.push_back({own, 0, kPollIn, 0});
  }
  if (zmq_.poll(items.data(), int(items.size()), 200) < 0) {
    if (zmq_.zmq_errno() == kEterm) stopping_ = true;
    return;
  }
  for (std::size_t i = first_own; i < items.size(); i++) {
    if (!items[i].revents) continue;
    items[i].socket == zap_ ? answer_zap() : read_monitor(network_monitor_, nullptr);
  }
  for (std::size_t i = 0; i < peers.size(); i++) {
    if (items[i].revents) read_monitor(peers[i]->monitor, peers[i]);
    judge(peers[i]);
  }
}

void ZmqAgent::read_monitor(void* monitor, const std::shared_ptr<Peer>& peer) {
  Frame what(zmq_), where(zmq_);
  if (zmq_.msg_recv(what.get(), monitor, kDontWait) < 0) return;
  if (what.more()) zmq_.msg_recv(where.get(), monitor, kDontWait);
  uint16_t event = 0;
  std::memcpy(&event, what.data(), std::min(sizeof event, what.size()));
  if (!peer) {
    counters_.refused += (event & kHandshakeFailed) != 0;
    return;
  }
  std::lock_guard<std::mutex> guard(peer->mutex);
  if (event == kDisconnected && !peer->disconnected) peer->disconnected = Clock::now();
  if (event == kHandshakeSucceeded) {
    peer->met = true;
    peer->disconnected.reset();
  }
}

// A lost connection is a lost worker where its process is no more, or does not come back.
void ZmqAgent::judge(const std::shared_ptr<Peer>& peer) {
  std::string why;
  {
    std::lock_guard<std::mutex> guard(peer->mutex);
    if (!peer->gone.empty()) {
      close_quietly(zmq_, peer->monitor, 0);
      return;
    }
    if (!peer->disconnected) return;
    auto silent = Clock::now() - *peer->disconnected;
    bool dead = peer->pid && kill(peer->pid, 0) != 0 && errno == ESRCH;
    auto patience = peer->pid && peer->met ? 2000 : settings_.heartbeat_timeout_ms;
    if (!dead && silent < std::chrono::milliseconds(patience)) return;
    why = "worker '" + peer->info.name_ + "' is gone: " +
          (dead ? "its process " + std::to_string(peer->pid) + " has ended"
                : "its connection was lost");
  }
  crew_.answer([this, peer, why] { lose(peer, why); });
}

// Let in who has the common secret's client key (ZeroMQ's RFC 27).
void ZmqAgent::answer_zap() {
  std::vector<std::string> request;
  for (bool more = true; more;) {
    Frame frame(zmq_);
    if (zmq_.msg_recv(frame.get(), zap_, kDontWait) < 0) return;
    request.emplace_back(frame.data(), frame.size());
    more = frame.more();
  }
  bool known = request.size() == 7 && request[5] == "CURVE" && request[6] == keys_.client_public;
  std::string id = request.size() > 1 ? request[1] : "";
  std::vector<std::string> reply = {"1.0", id, known ? "200" : "400", "", "", ""};
  for (std::size_t i = 0; i < reply.size(); i++) {
    ZmqMessage frame;
    zmq_.msg_init_size(&frame, reply[i].size());
    std::memcpy(zmq_.msg_data(&frame), reply[i].data(), reply[i].size());
    zmq_.msg_send(&frame, zap_, kDontWait | (i + 1 < reply.size() ? kSendMore : 0));
  }
}

}  // namespace rankcall

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace rankcall;
  using Free = py::call_guard<py::gil_scoped_release>;
  py::module::import("torch._C._distributed_rpc");

  py::class_<ZmqAgent, rpc::RpcAgent, std::shared_ptr<ZmqAgent>>(module, "ZmqAgent")
      .def(py::init([](const std::string& name, int64_t id, float timeout_s,
                       const std::string& library, uint64_t session, std::size_t threads,
                       int64_t max_bytes, int heartbeat_timeout_ms) {
        return std::make_shared<ZmqAgent>(
            name, id, timeout_s,
            Settings{library, session, threads, max_bytes, heartbeat_timeout_ms});
      }))
      .def("bind_local", &ZmqAgent::bind_local, Free())
      .def("bind_network", &ZmqAgent::bind_network, Free())
      .def("use_keys",
           [](ZmqAgent& agent, std::string server_public, std::string server_secret,
              std::string client_public, std::string client_secret) {
             agent.use_keys({server_public, server_secret, client_public, client_secret});
           })
      .def("open_arena", &ZmqAgent::open_arena)
      .def("add_peer",
           [](ZmqAgent& agent, const std::string& name, int64_t id, uint64_t session,
              const std::string& endpoint, const std::string& arena, int pid) {
             agent.add_peer(std::make_shared<Peer>(name, id, session, arena, pid), endpoint);
           },
           Free())
      .def("remove_peer", &ZmqAgent::remove_peer, Free())
      .def("set_devices", &ZmqAgent::set_devices, Free())
      .def("on_join", &ZmqAgent::on_join)
      .def("on_control", &ZmqAgent::on_control)
      .def("on_lost", &ZmqAgent::on_lost)
      .def("on_close", &ZmqAgent::on_close)
      .def("control",
           [](ZmqAgent& agent, const std::string& to, const std::string& payload,
              float timeout_s) {
             return std::make_shared<torch::jit::PythonFutureWrapper>(
                 agent.control(to, payload, timeout_s));
           },
           Free())
      .def("gone", &ZmqAgent::gone, Free())
      .def("counts", &ZmqAgent::counts)
      .def("join", &ZmqAgent::join, py::arg("shutdown") = false, py::arg("timeout") = 0, Free())
      .def("get_worker_info", [](const ZmqAgent& agent) {
             return agent.getWorkerInfo();
           }, Free())
      .def("get_worker_info", [](const ZmqAgent& agent, const std::string& name) {
             return agent.getWorkerInfo(name);
           }, Free())
      .def("get_worker_info", [](const ZmqAgent& agent, rpc::worker_id_t id) {
             return agent.getWorkerInfo(id);
           }, Free());

  // For the tests: what the wire's parser makes of frames, without a socket.
  module.def("parse", [](const std::vector<std::string>& frames) {
    std::vector<std::size_t> sizes;
    for (std::size_t i = 1; i < frames.size(); i++) sizes.push_back(frames[i].size());
    try {
      auto parsed = parse(frames.at(0).data(), frames.at(0).size(), sizes);
      return py::make_tuple(int(parsed.header.kind), parsed.header.call,
                            py::bytes(parsed.payload, parsed.header.payload_bytes),
                            parsed.slots.size());
    } catch (const WireError& error) {
      throw py::value_error(error.what());
    }
  });
}
