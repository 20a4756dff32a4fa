// An agent for torch.distributed.rpc over ZeroMQ.
//
// Each worker binds a PULL socket and has one PUSH socket to every peer: answers come back over the
// answering worker's own connection. Nothing on a message's way takes the GIL but what torch does
// with it.
#pragma once

#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/request_callback_impl.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include "arena.h"
#include "crew.h"
#include "peer.h"
#include "python_thread.h"
#include "tensors.h"
#include "wire.h"
#include "zmq_api.h"

namespace rankcall {

using rpc::Message;
using rpc::MessageType;

constexpr std::size_t kLarge = 64 * 1024;  // from here on a buffer travels by itself

// What came in one message; the frames live as long as any tensor that lies in one.
struct Incoming {
  std::shared_ptr<Frame> head;
  std::vector<std::shared_ptr<Frame>> frames;
  Parsed parsed;
};

struct Settings {
  std::string library;
  uint64_t session = 0;
  std::size_t threads = 16;
  int64_t max_bytes = 0;
  int heartbeat_timeout_ms = 10000;
};

struct Keys {
  std::string server_public, server_secret, client_public, client_secret;
};

// How often each thing that should not happen did.
struct Counters {
  std::atomic<uint64_t> malformed{0}, stale{0}, strangers{0}, refused{0}, late_answers{0};
};

class ZmqAgent : public rpc::RpcAgent {
 public:
  ZmqAgent(const std::string& name, int64_t id, float timeout_s, Settings settings);
  ~ZmqAgent() override;

  // What torch asks of an agent.
  Future send(const rpc::WorkerInfo& to, c10::intrusive_ptr<rpc::Message> message,
              const float timeout_s = rpc::kUnsetRpcTimeout,
              const rpc::DeviceMap& device_map = {}) override;
  using rpc::RpcAgent::getWorkerInfo;
  const rpc::WorkerInfo& getWorkerInfo(const std::string& name) const override;
  const rpc::WorkerInfo& getWorkerInfo(rpc::worker_id_t id) const override;
  std::vector<rpc::WorkerInfo> getWorkerInfos() const override;
  void join(bool shutdown, float timeout_s) override;
  void sync() override {}
  void startImpl() override;
  void shutdownImpl() override;
  std::unordered_map<std::string, std::string> getMetrics() override;
  rpc::DeviceMap getDeviceMap(const rpc::WorkerInfo& to) const override;
  const std::vector<c10::Device>& getDevices() const override;

  // What the Python side sets up. Before start(), but for the peers.
  void bind_local(const std::string& path);
  std::string bind_network(const std::string& endpoint);
  void use_keys(Keys keys) { keys_ = std::move(keys); }
  void open_arena(std::string prefix, std::size_t limit) { arena_.open(std::move(prefix), limit); }
  void add_peer(std::shared_ptr<Peer> peer, const std::string& endpoint);
  void remove_peer(const std::string& name, uint64_t session) { peers_.remove(name, session); }
  void set_devices(std::unordered_map<std::string, rpc::DeviceMap> maps,
                   std::unordered_map<std::string, rpc::DeviceMap> reverse,
                   std::vector<c10::Device> devices);
  void on_join(py::object call) { on_join_ = std::move(call); }
  void on_control(py::object call) { on_control_ = std::move(call); }
  void on_lost(py::object call) { on_lost_ = std::move(call); }
  void on_close(py::object call) { on_close_ = std::move(call); }

  // What the Python side asks.
  Future control(const std::string& to, const std::string& payload, float timeout_s);
  std::unordered_map<std::string, std::string> gone() const;
  std::pair<uint64_t, uint64_t> counts() const {
    return {calls_.started_count(), calls_.ended_count()};
  }

 private:
  void addGilWaitTime(const std::chrono::microseconds wait) override {
    gil_wait_us_ += wait.count();
    gil_waits_++;
  }

  // Sending.
  Future call(const std::shared_ptr<Peer>& peer, Kind kind, rpc::Message& message,
              float timeout_s, const rpc::DeviceMap& map, c10::TypePtr type);
  std::string transmit(Peer& peer, Kind kind, uint64_t call, rpc::Message& message,
                       const rpc::DeviceMap& map);
  std::string transmit_parts(Peer& peer, ZmqMessage& head,
                             std::vector<torch::jit::WriteableTensorData>& frames);
  std::vector<Slot> place(Peer& peer, const TensorPack& pack,
                          std::vector<torch::jit::WriteableTensorData>& frames);
  void respond(const std::shared_ptr<Peer>& peer, uint64_t call, int64_t message_id,
               rpc::JitFuture& result);

  // Receiving.
  bool receive();
  void* readable() const;
  void dispatch(std::shared_ptr<Incoming> incoming);
  void handle_request(const std::shared_ptr<Peer>& peer, Incoming& incoming);
  void handle_answer(Incoming& incoming);
  void handle_control(const std::shared_ptr<Peer>& peer, Incoming& incoming);
  c10::intrusive_ptr<rpc::Message> message_of(Peer& peer, Incoming& incoming);
  Buffer buffer_of(Peer& peer, Incoming& incoming, std::size_t slot, std::size_t frame);

  // Ends of calls.
  void fail(Call call, const std::string& why, rpc::RPCErrorType type);
  void lose(const std::shared_ptr<Peer>& peer, const std::string& why);
  void watch_deadlines();
  void watch_peers();
  void poll_peers();
  void read_monitor(void* monitor, const std::shared_ptr<Peer>& peer);
  void judge(const std::shared_ptr<Peer>& peer);
  void answer_zap();
  void open_monitor(void* socket, const std::string& name, int events, void*& monitor);
  void close_sockets();
  void end_context();

  const Zmq& zmq_;
  const Settings settings_;
  Keys keys_;
  void* context_ = nullptr;
  void* local_ = nullptr;
  void* network_ = nullptr;
  void* network_monitor_ = nullptr;
  void* zap_ = nullptr;
  Peers peers_;
  Calls calls_;
  Arena arena_;
  Attachments attachments_;
  Counters counters_;
  Crew<PythonThread> crew_;
  std::thread deadlines_thread_, peers_thread_;
  std::atomic<uint64_t> next_call_{1};
  std::atomic<int64_t> serving_{0}, gil_wait_us_{0}, gil_waits_{0};
  std::atomic<bool> stopping_{false}, started_{false};

  mutable std::mutex devices_mutex_;
  std::unordered_map<std::string, rpc::DeviceMap> maps_, reverse_;
  std::deque<std::vector<c10::Device>> devices_{{}};  // torch keeps references to former lists

  py::object on_join_, on_control_, on_lost_, on_close_;
};

}  // namespace rankcall
