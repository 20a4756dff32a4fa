// The ZeroMQ side of an agent: one socket that everything arrives at, one that everything leaves by.
//
// `in` is a DEALER that only receives; it listens at a Unix socket and, with keys, at a TCP port.
// `out` is a ROUTER that only sends: the first frame of a message names the connection. A connection
// costs one descriptor on each side, and one monitor sees all connections of a socket. Nothing here
// locks: one thread at a time receives, one thread polls the monitors, and the agent guards `out`.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>

#include "wire.h"
#include "zmq_api.h"

namespace rankcall {

struct Keys {
  std::string server_public, server_secret, client_public, client_secret;
};

class Sockets {
 public:
  Sockets(const Zmq& zmq, int heartbeat_timeout_ms) : zmq_(zmq), context_(zmq.ctx_new()) {
    if (!context_) throw std::runtime_error("ZeroMQ gives no context: " + zmq_.error());
    zmq_.ctx_set(context_, kMaxSockets, 64);
    in_ = open(kDealer, heartbeat_timeout_ms);
    // No limits on queued messages, here and below. At a limit the send would fail, and with it a
    // call that was right; memory is bounded by the callers, who wait for their answers.
    zmq_.set(in_, kRcvHwm, 0);
    zmq_.set(in_, kHandshakeIvl, kHandshakeMs);
    in_monitor_ = monitor(in_, "in", kAccepted | kHandshakeSucceeded | kHandshakeFailed);
    out_ = open(kRouter, heartbeat_timeout_ms);
    zmq_.set(out_, kSndHwm, 0);
    zmq_.set(out_, kRouterMandatory, 1);  // else ZeroMQ drops a message without a route silently
    zmq_.set(out_, kReconnectIvl, 50);
    zmq_.set(out_, kReconnectIvlMax, 1000);
    out_monitor_ = monitor(out_, "out", kDisconnected | kHandshakeSucceeded);
  }

  ~Sockets() { end(); }
  Sockets(const Sockets&) = delete;
  Sockets& operator=(const Sockets&) = delete;

  // A socket's options apply to what it binds or connects afterwards, so this comes first.
  void bind_local(const std::string& endpoint, int64_t max_bytes) {
    zmq_.set(in_, kMaxMsgSize, max_bytes);
    bind(endpoint);
  }

  std::string bind_network(const std::string& endpoint, Keys keys) {
    keys_ = std::move(keys);
    if (!zap_) {
      zap_ = zmq_.socket(context_, kRep);
      if (zmq_.bind(zap_, "inproc://zeromq.zap.01") != 0) throw std::runtime_error(zmq_.error());
    }
    zmq_.set(in_, kCurveServer, 1);
    zmq_.set(in_, kCurveSecretKey, keys_.server_secret);
    zmq_.set(in_, kZapDomain, std::string("rankcall"));
    zmq_.set(in_, kMaxMsgSize, int64_t(kMaxNetworkFrame));
    zmq_.set(in_, kIpv6, int(endpoint.find('[') != std::string::npos));
    bind(endpoint);
    char bound[256];
    std::size_t size = sizeof bound;
    zmq_.getsockopt(in_, kLastEndpoint, bound, &size);
    return bound;
  }

  // Begins to connect, and returns the route; ZeroMQ tries again until it succeeds.
  std::string open_connection(const std::string& endpoint) {
    if (endpoint.starts_with("tcp://")) {
      zmq_.set(out_, kIpv6, int(endpoint.find('[') != std::string::npos));
      zmq_.set(out_, kCurveServerKey, keys_.server_public);
      zmq_.set(out_, kCurvePublicKey, keys_.client_public);
      zmq_.set(out_, kCurveSecretKey, keys_.client_secret);
    } else {
      zmq_.setsockopt(out_, kPlainUsername, nullptr, 0);  // back to no authentication
    }
    std::string route = "r" + std::to_string(++routes_);  // never used twice: that ends the process
    zmq_.set(out_, kConnectRoutingId, route);
    if (zmq_.connect(out_, endpoint.c_str()) != 0)
      throw std::runtime_error("cannot connect to " + endpoint + ": " + zmq_.error());
    return route;
  }

  void close_connection(const std::string& endpoint) { zmq_.disconnect(out_, endpoint.c_str()); }

  // Queues a whole message and returns why that failed, or nothing. Never blocks.
  std::string send(const std::string& route, const std::vector<Bytes>& frames) {
    if (!send_frame(copied(route.data(), route.size()), true)) return zmq_.error();
    for (std::size_t i = 0; i < frames.size(); i++)
      if (!send_frame(frames[i], i + 1 < frames.size())) return zmq_.error();
    return "";
  }

  // Blocks until a message is here. False at the end.
  bool receive(std::vector<Bytes>& frames) {
    for (bool more = true; more;) {
      auto frame = std::make_shared<Frame>(zmq_);
      if (zmq_.msg_recv(frame->get(), in_, 0) < 0) {
        frames.clear();
        return zmq_.zmq_errno() != kEterm;
      }
      more = frame->more();
      if (frames.size() <= kMaxBuffers) frames.push_back({frame->data(), frame->size(), frame});
    }
    return true;
  }

  // Waits for up to `milliseconds` and handles what has happened. Tells of connections that came up
  // or were lost by their endpoint. False at the end.
  bool poll(long milliseconds, const std::function<void(const std::string&, bool)>& changed) {
    ZmqPollItem items[] = {{in_monitor_, 0, kPollIn, 0},
                           {out_monitor_, 0, kPollIn, 0},
                           {zap_, 0, kPollIn, 0}};
    if (zmq_.poll(items, zap_ ? 3 : 2, milliseconds) < 0) return zmq_.zmq_errno() != kEterm;
    if (zap_ && items[2].revents) answer_zap();
    while (auto event = read_event(in_monitor_)) count_connection(event->first);
    while (auto event = read_event(out_monitor_))
      changed(event->second, event->first == kHandshakeSucceeded);
    // A connection that neither succeeded nor failed by its deadline was closed for other reasons,
    // such as a frame that is too large.
    auto deadline = Clock::now() - std::chrono::milliseconds(kHandshakeMs + 1000);
    for (; !handshakes_.empty() && handshakes_.front() < deadline; refused_++)
      handshakes_.pop_front();
    return true;
  }

  // Has `out` handle what its connections have sent it, such as that they are closed.
  void process_commands() {
    int events;
    std::size_t size = sizeof events;
    zmq_.getsockopt(out_, kEvents, &events, &size);
  }

  // How many connections did not authenticate themselves.
  uint64_t refused() const { return refused_; }

  // Ends all blocking calls on the sockets. Messages that were queued get `linger_ms` to leave.
  void stop(int linger_ms) {
    zmq_.set(out_, kLinger, linger_ms);
    zmq_.ctx_shutdown(context_);
  }

  // No thread may be in a call on a socket.
  void end() {
    if (!context_) return;
    if (out_) zmq_.close(out_);
    for (void** socket : {&in_, &in_monitor_, &out_monitor_, &zap_}) zmq_.close_at_once(*socket);
    out_ = nullptr;
    zmq_.ctx_term(std::exchange(context_, nullptr));
  }

 private:
  using Clock = std::chrono::steady_clock;

  // Keeps the memory of a frame until ZeroMQ, on a thread of its own, lets go of it. The flag shows
  // ThreadSanitizer the order in which the two threads use this object: it does not see ZeroMQ's.
  struct Owner {
    std::shared_ptr<const void> memory;
    std::atomic<bool> is_handed_over{false};
  };

  static constexpr int kHandshakeMs = 3000;  // a stranger may hold a descriptor for so long
  static constexpr std::size_t kCopied = 4096;  // a frame up to here is copied: that is faster

  void* open(int type, int heartbeat_timeout_ms) {
    void* socket = zmq_.socket(context_, type);
    if (!socket) throw std::runtime_error("ZeroMQ gives no socket: " + zmq_.error());
    zmq_.set(socket, kLinger, 0);
    zmq_.set(socket, kHeartbeatIvl, heartbeat_timeout_ms / 4);
    zmq_.set(socket, kHeartbeatTimeout, heartbeat_timeout_ms);
    return socket;
  }

  void* monitor(void* socket, const std::string& name, int events) {
    std::string address = "inproc://monitor-" + name;
    zmq_.socket_monitor(socket, address.c_str(), events);
    void* monitor = zmq_.socket(context_, kPair);
    zmq_.set(monitor, kLinger, 0);
    zmq_.set(monitor, kRcvHwm, 0);
    zmq_.connect(monitor, address.c_str());
    return monitor;
  }

  void bind(const std::string& endpoint) {
    if (zmq_.bind(in_, endpoint.c_str()) != 0)
      throw std::runtime_error("cannot listen at " + endpoint + ": " + zmq_.error());
  }

  bool send_frame(const Bytes& bytes, bool more) {
    ZmqMessage frame;
    if (bytes.owner && bytes.size > kCopied) {
      auto* owner = new Owner{bytes.owner};
      auto release = [](void*, void* kept) {
        auto* owner = static_cast<Owner*>(kept);
        if (owner->is_handed_over.load(std::memory_order_acquire)) delete owner;
      };
      owner->is_handed_over.store(true, std::memory_order_release);
      zmq_.msg_init_data(&frame, const_cast<char*>(bytes.data), bytes.size, release, owner);
    } else {
      zmq_.msg_init_size(&frame, bytes.size);
      if (bytes.size) std::memcpy(zmq_.msg_data(&frame), bytes.data, bytes.size);
    }
    if (zmq_.msg_send(&frame, out_, kDontWait | (more ? kSendMore : 0)) >= 0) return true;
    zmq_.msg_close(&frame);
    return false;
  }

  static Bytes copied(const char* data, std::size_t size) { return {data, size, nullptr}; }

  std::optional<std::pair<int, std::string>> read_event(void* monitor) {
    Frame what(zmq_), where(zmq_);
    if (zmq_.msg_recv(what.get(), monitor, kDontWait) < 0) return std::nullopt;
    if (what.more()) zmq_.msg_recv(where.get(), monitor, kDontWait);
    uint16_t event = 0;
    std::memcpy(&event, what.data(), std::min(sizeof event, what.size()));
    return std::make_pair(int(event), std::string(where.data(), where.size()));
  }

  void count_connection(int event) {
    if (event == kAccepted) {
      handshakes_.push_back(Clock::now());
    } else if (!handshakes_.empty()) {
      handshakes_.pop_back();  // which one it was does not matter for the count
      refused_ += event != kHandshakeSucceeded;
    }
  }

  // Admits a connection that has the client key of the common secret (ZeroMQ's RFC 27).
  void answer_zap() {
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

  const Zmq& zmq_;
  void* context_;
  void* in_ = nullptr;
  void* in_monitor_ = nullptr;
  void* out_ = nullptr;
  void* out_monitor_ = nullptr;
  void* zap_ = nullptr;
  Keys keys_;
  uint64_t routes_ = 0;
  std::deque<Clock::time_point> handshakes_;  // of connections that are not authenticated yet
  std::atomic<uint64_t> refused_{0};
};

}  // namespace rankcall
