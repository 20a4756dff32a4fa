// How calls end without an answer: deadlines, and workers that are no more.
#include "agent.h"

#include <csignal>

namespace rankcall {

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
    zmq_.close_at_once(peer->socket);
  }
  arena_.reclaim(peer->info.id_);
  if (!peer->arena.empty()) attachments_.forget(peer->arena);
  for (auto& call : calls_.take_all(peer))
    fail(std::move(call), why, rpc::RPCErrorType::UNKNOWN_ERROR);
  if (stopping_) return;
  py::gil_scoped_acquire gil;
  try {
    py::object call = on_lost_;
    if (call) call(peer->info.name_, peer->session, why);
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
      zmq_.close_at_once(peer->monitor);
      return;
    }
    if (!peer->disconnected) return;
    auto silent = Clock::now() - *peer->disconnected;
    bool dead = peer->pid && kill(peer->pid, 0) != 0 && errno == ESRCH;
    auto patience = peer->pid && peer->met ? 2000 : settings_.heartbeat_timeout_ms;
    if (!dead && silent < std::chrono::milliseconds(patience)) return;
    auto process = "its process " + std::to_string(peer->pid);
    why = "worker '" + peer->info.name_ + "' is gone: " +
          (dead        ? process + " has ended"
           : peer->pid ? process + " no longer answers (is it stopped?)"
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
