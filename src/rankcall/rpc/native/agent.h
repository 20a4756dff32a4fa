// An agent for torch.distributed.rpc over ZeroMQ.
//
// Answers come over the answering worker's own connection. A connection is made when the first
// message is sent on it, and two lives of two workers have at most one: if it is lost, each side
// gives the other one up for ever. So no request is sent or run twice. A request from a peer
// that was given up is refused before it runs.
//
// All threads and callbacks share the agent, so it outlives them, and everything that they use is
// part of it. No lock is held while a callback or Python code runs: both may call the agent, or wait
// for the GIL, which another thread may hold while it waits for the lock. With connections_mutex_
// held, only the mutex of the peers is taken; every other mutex is taken alone.
//
// agent.cpp has the ends of calls, peers and the agent; messages.cpp sends and receives.
#pragma once

#include <ATen/record_function.h>
#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/request_callback_impl.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include "block_copy.h"
#include "peers.h"
#include "shared_memory.h"
#include "sockets.h"
#include "tensors.h"
#include "wire.h"
#include "worker_pool.h"

namespace rankcall {

using rpc::Message;
using rpc::MessageType;

// A buffer of this size is not packed into the head. To copy a smaller one into the head costs less
// than a frame or a block of shared memory of its own.
constexpr std::size_t kLarge = 64 * 1024;

struct Settings {
  std::string library;
  uint64_t session = 0;
  std::size_t threads = 16;
  int64_t max_bytes = 0;
  int heartbeat_timeout_ms = 10000;
};

// How often each thing that should not happen did.
struct Counters {
  std::atomic<uint64_t> malformed{0}, stale{0}, strangers{0}, given_up{0}, late_answers{0};
};

inline bool is_interpreter_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

// Keeps one Python thread state for a native thread: making one for each call is slow.
class PythonThread {
 public:
  PythonThread() : gil_(PyGILState_Ensure()), state_(PyEval_SaveThread()) {}
  // The interpreter may begin to end after the check. Then taking the GIL ends the thread by an
  // exception that has to leave the destructor.
  ~PythonThread() noexcept(false) {
    if (is_interpreter_ending()) return;
    PyEval_RestoreThread(state_);
    PyGILState_Release(gil_);
  }

 private:
  PyGILState_STATE gil_;
  PyThreadState* state_;
};

class ZmqAgent : public rpc::RpcAgent, public std::enable_shared_from_this<ZmqAgent> {
 public:
  ZmqAgent(const std::string& name, int64_t id, float timeout_s, Settings settings);
  ~ZmqAgent() override;

  // For torch.
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

  // For the Python side, before the agent starts.
  void bind_local(const std::string& path) { sockets_.bind_local(path, settings_.max_bytes); }
  std::string bind_network(const std::string& endpoint, Keys keys) {
    return sockets_.bind_network(endpoint, std::move(keys));
  }
  void open_slabs(std::string prefix, std::size_t limit) {
    own_slabs_.open(std::move(prefix), limit);
  }
  void on_join(py::object call) { on_join_ = std::move(call); }
  void on_control(py::object call) { on_control_ = std::move(call); }
  void on_lost(py::object call) { on_lost_ = std::move(call); }
  void on_close(py::object call) { on_close_ = std::move(call); }

  // For the Python side, at any time.
  void add_peer(const std::shared_ptr<Peer>& peer);
  void remove_peer(const std::string& name, uint64_t session) { peers_.remove(name, session); }
  // A lower version than the last one is ignored: several threads of the Python side may call this,
  // in another order than that in which they looked at the members.
  void set_devices(uint64_t version, std::unordered_map<std::string, rpc::DeviceMap> maps,
                   std::unordered_map<std::string, rpc::DeviceMap> reverse,
                   std::vector<c10::Device> devices);
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

  // Sending: messages.cpp.
  Future call(const std::shared_ptr<Peer>& peer, Kind kind, rpc::Message& message,
              float timeout_s, const rpc::DeviceMap& map, c10::TypePtr type);
  std::string transmit(Peer& peer, Kind kind, uint64_t call, rpc::Message& message,
                       const rpc::DeviceMap& map);
  std::string transmit_text(Peer& peer, Kind kind, uint64_t call, const std::string& text,
                            MessageType type = MessageType::UNKNOWN);
  BlockInUse take_back(Peer& peer, const c10::Storage& storage);
  std::vector<Slot> place(Peer& peer, const TensorPack& pack, std::vector<Bytes>& parts,
                          std::vector<BlockInUse>& blocks);
  std::string deliver(Peer& peer, bool is_refusal, const std::vector<Bytes>& parts);
  std::string deliver_chunks(Peer& peer, const std::vector<Bytes>& parts);
  void respond(const std::shared_ptr<Peer>& peer, uint64_t call, int64_t message_id,
               rpc::JitFuture& result);

  // Receiving: messages.cpp.
  bool receive();
  void decode(std::vector<Bytes> frames);
  void dispatch(std::shared_ptr<Incoming> incoming);
  void handle_request(const std::shared_ptr<Peer>& peer, Incoming& incoming);
  void handle_answer(const std::shared_ptr<Peer>& peer, Incoming& incoming);
  void handle_control(Incoming& incoming);
  void refuse(const std::shared_ptr<Peer>& peer);
  std::vector<Buffer> buffers_of(Peer& peer, Incoming& incoming);
  Buffer shared_buffer(Peer& peer, const Slot& slot);
  c10::intrusive_ptr<rpc::Message> message_of(Peer& peer, Incoming& incoming);

  // Ends of calls and peers: agent.cpp.
  void fail(Call call, const std::string& why, rpc::RPCErrorType type);
  enum class Loss { kLeft, kGaveUp, kDied, kLost };
  void lose(const std::shared_ptr<Peer>& peer, const std::string& why, Loss loss);
  std::string reason_gone(const Peer& peer) const;  // empty if it is not
  bool is_in_touch(const Peer& peer) const;
  void open_connection(Peer& peer);
  void close_connection(Peer& peer);
  void watch_deadlines();
  void watch_connections();
  void connection_changed(const std::string& endpoint, bool is_up);
  void judge(const std::shared_ptr<Peer>& peer);

  const Zmq& zmq_;
  const Settings settings_;
  Sockets sockets_;
  Assembler assembler_;
  Peers peers_;
  Calls calls_;
  OwnSlabs own_slabs_;
  BlockCopy copy_;
  OthersSlabs others_slabs_;
  Counters counters_;
  WorkerPool<PythonThread> pool_;
  std::thread deadlines_thread_, connections_thread_;
  std::atomic<uint64_t> next_call_{1};
  std::atomic<int64_t> serving_{0}, gil_wait_us_{0}, gil_waits_{0};
  std::atomic<bool> stopping_{false}, is_forked_copy_{false};

  // Guards sockets_.send() and its like, and the connections of the peers.
  mutable std::mutex connections_mutex_;
  std::unordered_map<std::string, std::shared_ptr<Peer>> connected_;  // by endpoint
  bool is_closed_ = false;
  uint64_t transfers_ = 0;

  mutable std::mutex devices_mutex_;
  uint64_t devices_version_ = 0;
  std::unordered_map<std::string, rpc::DeviceMap> maps_, reverse_;
  std::deque<std::vector<c10::Device>> devices_{{}};  // torch keeps references to former lists

  py::object on_join_, on_control_, on_lost_, on_close_;
};

}  // namespace rankcall
