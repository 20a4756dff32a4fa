// The agent towards torch, the ends of calls without an answer, and the end of the agent.
#include "agent.h"

#include <pthread.h>

#include "process_state.h"

namespace rankcall {
namespace {

// The time for requests to end in a shutdown: less than rankcall may hold up an exit.
constexpr std::chrono::seconds kPatience{1};
// A dying process closes its sockets before it counts as ended.
constexpr std::chrono::milliseconds kDyingTime{500};

// torch leaves the profiler of a request on the thread that served it. The next request there would
// record each operator twice, and torch drops such doubles from the profile.
void forget_profilers() {
  if (at::hasThreadLocalCallbacks()) at::clearThreadLocalCallbacks();
}

// A forked child has the agent, but not its threads. It keeps the agent for ever, so that no
// destructor waits for them.
std::weak_ptr<ZmqAgent>& started_agent() {
  static auto* agent = new std::weak_ptr<ZmqAgent>();
  return *agent;
}

}  // namespace

ZmqAgent::ZmqAgent(const std::string& name, int64_t id, float timeout_s, Settings settings)
    : rpc::RpcAgent(rpc::WorkerInfo(name, id), std::make_unique<rpc::RequestCallbackImpl>(),
                    milliseconds(timeout_s)),
      zmq_(load_zmq(settings.library)),
      settings_(std::move(settings)),
      sockets_(zmq_, settings_.heartbeat_timeout_ms),
      assembler_(uint64_t(settings_.max_bytes)) {}

ZmqAgent::~ZmqAgent() {
  if (!on_join_ && !on_control_ && !on_lost_ && !on_close_) return;  // after a shutdown
  py::gil_scoped_acquire gil;
  on_join_ = on_control_ = on_lost_ = on_close_ = py::object();
}

// Peers and their connections.

void ZmqAgent::add_peer(const std::shared_ptr<Peer>& peer) {
  const std::string& name = peer->info.name_;
  auto former = peers_.find_name(name);
  if (former && former->session == peer->session) return;
  // First, as both may have the same endpoint.
  if (former) lose(former, "worker '" + name + "' is gone: it has started again", Loss::kDied);
  peers_.add(peer);
}

// With connections_mutex_ held.
void ZmqAgent::open_connection(Peer& peer) {
  peer.route = sockets_.open_connection(peer.endpoint);
  peer.changed = Clock::now();
  connected_[peer.endpoint] = peers_.find_session(peer.session);
}

// With connections_mutex_ held. Messages that have not left yet are dropped.
void ZmqAgent::close_connection(Peer& peer) {
  if (std::exchange(peer.route, "").empty()) return;
  sockets_.close_connection(peer.endpoint);
  connected_.erase(peer.endpoint);
  peer.is_up = false;
}

void ZmqAgent::connection_changed(const std::string& endpoint, bool is_up) {
  std::lock_guard<std::mutex> guard(connections_mutex_);
  auto found = connected_.find(endpoint);
  if (found == connected_.end()) return;
  Peer& peer = *found->second;
  peer.is_up = is_up;
  peer.was_up |= is_up;
  peer.changed = Clock::now();
}

// Gives a peer up for ever: calls to it fail, now and later, and its requests are refused.
void ZmqAgent::lose(const std::shared_ptr<Peer>& peer, const std::string& why, Loss loss) {
  {
    std::lock_guard<std::mutex> guard(connections_mutex_);
    if (!peer->gone.empty()) return;
    // Before the calls are taken: a call that is added later finds this when it is sent, and fails
    // there. So none is left that nobody completes.
    peer->gone = why;
    close_connection(*peer);
  }
  own_slabs_.close(peer->session);
  if (peer->is_local()) others_slabs_.close(peer->slabs);
  assembler_.forget(peer->session);
  for (auto& call : calls_.take_all(peer))
    fail(std::move(call), why, rpc::RPCErrorType::UNKNOWN_ERROR);
  if (stopping_) return;
  if (loss == Loss::kLost) refuse(peer);
  // On a thread of its own: the caller may hold locks that the callback takes.
  pool_.add_answer([this, peer, loss] {
    py::gil_scoped_acquire gil;
    try {
      py::object call = on_lost_;
      if (call) call(peer->info.name_, peer->session, loss == Loss::kDied || loss == Loss::kLost);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("rankcall.rpc: a lost worker");
    }
  });
}

// Tells a peer that was given up, if it can still be reached, that it was.
void ZmqAgent::refuse(const std::shared_ptr<Peer>& peer) {
  std::string why = "worker '" + getWorkerInfo().name_ + "' has given this worker up (" +
                    reason_gone(*peer) + ") and runs none of its calls. If this worker was " +
                    "stopped for longer than heartbeat_timeout, call shutdown() and init_rpc() again";
  transmit_text(*peer, Kind::kRefusal, 0, why);
}

bool ZmqAgent::is_in_touch(const Peer& peer) const {
  std::lock_guard<std::mutex> guard(connections_mutex_);
  return peer.gone.empty() && (!peer.route.empty() || peer.was_heard);
}

std::string ZmqAgent::reason_gone(const Peer& peer) const {
  std::lock_guard<std::mutex> guard(connections_mutex_);
  return peer.gone;
}

std::unordered_map<std::string, std::string> ZmqAgent::gone() const {
  std::unordered_map<std::string, std::string> gone;
  for (const auto& peer : peers_.members()) {
    std::string reason = reason_gone(*peer);
    if (!reason.empty()) gone[peer->info.name_] = reason;
  }
  return gone;
}

void ZmqAgent::watch_connections() {
  PythonThread python;
  pthread_setname_np(pthread_self(), "rankcall-rpc-w");
  auto changed = [this](const std::string& endpoint, bool is_up) {
    connection_changed(endpoint, is_up);
  };
  // The poll wakes up for changes of connections. Five times a second it also looks for processes
  // that have ended, and for the end of the agent: of these no socket tells.
  while (!stopping_ && sockets_.poll(200, changed)) {
    std::vector<std::shared_ptr<Peer>> connected;
    {
      std::lock_guard<std::mutex> guard(connections_mutex_);
      sockets_.process_commands();
      for (const auto& [endpoint, peer] : connected_) connected.push_back(peer);
    }
    for (const auto& peer : connected) judge(peer);
  }
}

// A peer whose connection was lost, or does not come up, is gone.
void ZmqAgent::judge(const std::shared_ptr<Peer>& peer) {
  std::string why;
  bool is_dead = false;
  {
    std::lock_guard<std::mutex> guard(connections_mutex_);
    if (!peer->gone.empty()) {
      if (Clock::now() > peer->close_at) close_connection(*peer);
      return;
    }
    if (peer->is_up || peer->route.empty()) return;
    is_dead = peer->pid && has_ended(peer->pid);
    // A connection that was up is not made again (see agent.h), so its loss is final. On this host
    // there is a moment to find out that the process has ended, which is the better message. A
    // connection that was never up gets the time that a silent peer gets.
    auto patience = peer->was_up ? (peer->is_local() ? kDyingTime : std::chrono::milliseconds(0))
                                 : std::chrono::milliseconds(settings_.heartbeat_timeout_ms);
    if (!is_dead && Clock::now() - peer->changed < patience) return;
    auto process = "its process " + std::to_string(peer->pid);
    why = "worker '" + peer->info.name_ + "' is gone: " +
          (is_dead         ? process + " has ended"
           : peer->pid     ? process + " no longer answers (is it stopped?)"
           : peer->was_up  ? "its connection was lost"
                           : "nothing answers at " + peer->endpoint);
  }
  pool_.add_answer([this, peer, why, is_dead] {
    lose(peer, why, is_dead ? Loss::kDied : Loss::kLost);
  });
}

// The ends of calls.

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
      pool_.add_answer([this, shared, why] {
        fail(std::move(*shared), why, rpc::RPCErrorType::TIMEOUT);
      });
    }
  }
}

// What torch calls.

const rpc::WorkerInfo& ZmqAgent::getWorkerInfo(const std::string& name) const {
  auto peer = peers_.find_name(name);
  TORCH_CHECK(peer, "could not find destination: there is no worker '", name, "' in the group");
  return peer->info;
}

const rpc::WorkerInfo& ZmqAgent::getWorkerInfo(rpc::worker_id_t id) const {
  auto peer = peers_.find_id(id);
  TORCH_CHECK(peer, "could not find destination: there is no worker with id ", id, " in the group");
  return peer->info;
}

std::vector<rpc::WorkerInfo> ZmqAgent::getWorkerInfos() const {
  std::vector<rpc::WorkerInfo> infos;
  for (const auto& peer : peers_.members()) infos.push_back(peer->info);
  return infos;
}

void ZmqAgent::set_devices(uint64_t version, std::unordered_map<std::string, rpc::DeviceMap> maps,
                           std::unordered_map<std::string, rpc::DeviceMap> reverse,
                           std::vector<c10::Device> devices) {
  std::lock_guard<std::mutex> guard(devices_mutex_);
  if (version < devices_version_) return;
  devices_version_ = version;
  maps_ = std::move(maps);
  reverse_ = std::move(reverse);
  if (devices != devices_.back()) devices_.push_back(std::move(devices));
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
      {"agent.thread_pool_size", text(pool_.threads())},
      {"agent.num_idle_threads", text(pool_.idle())},
      {"agent.arena_bytes", text(own_slabs_.total())},
      {"agent.malformed", text(counters_.malformed.load())},
      {"agent.stale", text(counters_.stale.load())},
      {"agent.strangers", text(counters_.strangers.load())},
      {"agent.given_up", text(counters_.given_up.load())},
      {"agent.refused", text(sockets_.refused())},
      {"agent.late_answers", text(counters_.late_answers.load())},
  };
  if (isGILProfilingEnabled()) {
    int64_t waits = std::max<int64_t>(gil_waits_, 1);
    metrics["agent.gil_average_wait_time_us"] = text(double(gil_wait_us_) / double(waits));
  }
  return metrics;
}

// The start and the end of the agent.

void ZmqAgent::startImpl() {
  started_agent() = weak_from_this();
  static int registered = pthread_atfork(nullptr, nullptr, [] {
    auto agent = started_agent().lock();
    if (!agent) return;
    agent->is_forked_copy_ = true;
    new std::shared_ptr<ZmqAgent>(agent);
  });
  (void)registered;
  auto self = shared_from_this();
  pool_.start(settings_.threads, self, [this] { return receive(); }, forget_profilers,
              [](const char* what) { TORCH_WARN("rankcall.rpc goes on after a failure: ", what); });
  deadlines_thread_ = std::thread([self] { self->watch_deadlines(); });
  connections_thread_ = std::thread([self] { self->watch_connections(); });
}

void ZmqAgent::shutdownImpl() {
  if (is_forked_copy_ || stopping_.exchange(true)) return;
  // The order: the others learn it while the sockets still send; own calls fail before the threads
  // stop that run their callbacks; the sockets' end wakes the threads; memory goes when no thread
  // can use it any more; on_close_, which removes the files, comes last.
  std::string farewell = "worker '" + getWorkerInfo().name_ + "' has left";
  for (const auto& peer : peers_.members()) {
    if (is_in_touch(*peer)) transmit_text(*peer, Kind::kFarewell, 0, farewell);
  }
  for (auto& call : calls_.take_all(nullptr))
    fail(std::move(call), "RPC is shutting down on worker '" + getWorkerInfo().name_ + "'",
         rpc::RPCErrorType::UNKNOWN_ERROR);
  calls_.close();
  {
    std::lock_guard<std::mutex> guard(connections_mutex_);
    is_closed_ = true;
    for (const auto& [endpoint, peer] : connected_)
      if (!peer->gone.empty()) sockets_.close_connection(endpoint);
    sockets_.stop(/*linger_ms=*/500);  // for the farewells; a stopped peer must not hold us up
  }
  if (deadlines_thread_.joinable()) deadlines_thread_.join();
  if (connections_thread_.joinable()) connections_thread_.join();
  // If a thread is still in a call on a socket, the sockets are left to the agent's destructor.
  if (pool_.stop(kPatience)) sockets_.end();
  for (const auto& peer : peers_.all()) own_slabs_.close(peer->session);
  py::gil_scoped_acquire gil;
  if (on_close_) on_close_();
  on_join_ = on_control_ = on_lost_ = on_close_ = py::object();
}

}  // namespace rankcall
