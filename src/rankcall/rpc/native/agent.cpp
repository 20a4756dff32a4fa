// Setting an agent up, what torch asks of it, taking it down.
#include "agent.h"

namespace rankcall {
namespace {

// What requests get to end in a shutdown: less than all of rankcall may hold up an exit.
constexpr std::chrono::seconds kPatience{1};

}  // namespace

ZmqAgent::ZmqAgent(const std::string& name, int64_t id, float timeout_s, Settings settings)
    : rpc::RpcAgent(rpc::WorkerInfo(name, id), std::make_unique<rpc::RequestCallbackImpl>(),
                    milliseconds(timeout_s)),
      zmq_(load_zmq(settings.library)),
      settings_(std::move(settings)) {
  context_ = zmq_.ctx_new();
  TORCH_CHECK(context_, "ZeroMQ gives no context: ", zmq_.error());
  zmq_.ctx_set(context_, kMaxSockets, 16384);
}

ZmqAgent::~ZmqAgent() {
  if (started_ && !stopping_) shutdownImpl();
  end_context();
  py::gil_scoped_acquire gil;
  on_join_ = on_control_ = on_lost_ = on_close_ = py::object();
}

// ZeroMQ's own threads end with it.
void ZmqAgent::end_context() {
  void* ending = std::exchange(context_, nullptr);
  if (!ending || zmq_.ctx_shutdown(ending) != 0) return;
  close_sockets();
  zmq_.ctx_term(ending);
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
  py::object call = on_join_;
  if (call) call(shutdown, timeout_s);
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
  crew_.start(settings_.threads, [this] { return receive(); }, forget_profilers);
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
  if (!crew_.stop(kPatience)) {
    // A request does not come to an end. Its thread will look for this agent when it does.
    static std::vector<std::shared_ptr<rpc::RpcAgent>> kept;
    kept.push_back(rpc::RpcAgent::getCurrentRpcAgent());
    close_sockets();
  } else {
    end_context();
  }
  py::gil_scoped_acquire gil;
  if (on_close_) on_close_();
  // They know this agent: it would never be freed.
  on_join_ = on_control_ = on_lost_ = on_close_ = py::object();
}

void ZmqAgent::close_sockets() {
  for (const auto& peer : peers_.ever()) {
    std::lock_guard<std::mutex> guard(peer->mutex);
    if (peer->gone.empty()) peer->gone = "RPC is no longer running here";
    if (peer->socket) zmq_.close(peer->socket);
    peer->socket = nullptr;
    zmq_.close_at_once(peer->monitor);
  }
  for (void** socket : {&local_, &network_, &network_monitor_, &zap_})
    zmq_.close_at_once(*socket);
}

}  // namespace rankcall
