// The other workers, as one agent knows them, and the calls that wait for their answers.
#pragma once

#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace rankcall {

namespace rpc = torch::distributed::rpc;
using Clock = std::chrono::steady_clock;
using Future = c10::intrusive_ptr<rpc::JitFuture>;

struct Peer {
  Peer(std::string name, int64_t id, uint64_t session, std::string arena, int pid)
      : info(std::move(name), id), session(session), arena(std::move(arena)), pid(pid) {}

  const rpc::WorkerInfo info;
  const uint64_t session;
  const std::string arena;  // what its block files' paths begin with; empty on another host
  const int pid;            // 0 on another host

  std::mutex mutex;  // of all below
  void* socket = nullptr;
  void* monitor = nullptr;  // used by the watching thread alone
  std::string gone;         // why nothing more is sent to it, or empty
  bool met = false;         // there has been a connection
  std::optional<Clock::time_point> disconnected = Clock::now();
};

// Who is in the group. A worker that has been in it stays known by reference: torch keeps those.
class Peers {
 public:
  void add(std::shared_ptr<Peer> peer) {
    std::lock_guard<std::mutex> guard(mutex_);
    all_.push_back(peer);
    by_name_[peer->info.name_] = peer;
    by_id_[peer->info.id_] = peer;
  }

  // Nothing is done where another life of that name has come since.
  void remove(const std::string& name, uint64_t session) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = by_name_.find(name);
    if (found == by_name_.end() || found->second->session != session) return;
    auto peer = found->second;
    by_name_.erase(found);
    by_id_.erase(peer->info.id_);
  }

  std::shared_ptr<Peer> find(rpc::worker_id_t id) const {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = by_id_.find(id);
    return found == by_id_.end() ? nullptr : found->second;
  }

  std::shared_ptr<Peer> find(const std::string& name) const {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : found->second;
  }

  std::vector<std::shared_ptr<Peer>> members() const {
    std::lock_guard<std::mutex> guard(mutex_);
    std::vector<std::shared_ptr<Peer>> members;
    for (const auto& [id, peer] : by_id_) members.push_back(peer);
    return members;
  }

  std::vector<std::shared_ptr<Peer>> ever() const {
    std::lock_guard<std::mutex> guard(mutex_);
    return all_;
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<Peer>> by_name_;
  std::map<rpc::worker_id_t, std::shared_ptr<Peer>> by_id_;
  std::vector<std::shared_ptr<Peer>> all_;
};

struct Call {
  Future future;
  std::shared_ptr<Peer> peer;
  std::chrono::milliseconds timeout;  // 0: none
  Clock::time_point deadline;
};

// The calls under way. Whoever takes one out ends its future.
class Calls {
 public:
  void add(uint64_t id, Call call) {
    std::lock_guard<std::mutex> guard(mutex_);
    started_++;
    if (call.timeout.count() > 0) {
      bool first = deadlines_.empty() || call.deadline < deadlines_.begin()->first;
      deadlines_.emplace(call.deadline, id);
      if (first) earlier_.notify_one();
    }
    calls_.emplace(id, std::move(call));
  }

  std::optional<Call> take(uint64_t id) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = calls_.find(id);
    if (found == calls_.end()) return std::nullopt;
    return remove(found);
  }

  // Wait until calls are overdue and take them; empty once closed.
  std::vector<Call> take_overdue() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!closed_) {
      if (deadlines_.empty()) {
        earlier_.wait(lock);
        continue;
      }
      auto first = deadlines_.begin()->first;
      if (Clock::now() < first) {
        earlier_.wait_until(lock, first);
        continue;
      }
      std::vector<Call> overdue;
      while (!deadlines_.empty() && deadlines_.begin()->first <= Clock::now())
        overdue.push_back(remove(calls_.find(deadlines_.begin()->second)));
      return overdue;
    }
    return {};
  }

  std::vector<Call> take_all(const std::shared_ptr<Peer>& peer) {
    std::lock_guard<std::mutex> guard(mutex_);
    std::vector<Call> taken;
    for (auto each = calls_.begin(); each != calls_.end();) {
      auto next = std::next(each);
      if (!peer || each->second.peer == peer) taken.push_back(remove(each));
      each = next;
    }
    return taken;
  }

  void ended() { ended_++; }  // after the callbacks have run: they may have started more
  uint64_t started_count() const { return started_; }
  uint64_t ended_count() const { return ended_; }

  void close() {
    std::lock_guard<std::mutex> guard(mutex_);
    closed_ = true;
    earlier_.notify_all();
  }

 private:
  using Table = std::unordered_map<uint64_t, Call>;

  Call remove(Table::iterator found) {
    Call call = std::move(found->second);
    if (call.timeout.count() > 0) deadlines_.erase({call.deadline, found->first});
    calls_.erase(found);
    return call;
  }

  std::mutex mutex_;
  std::condition_variable earlier_;
  Table calls_;
  std::set<std::pair<Clock::time_point, uint64_t>> deadlines_;
  std::atomic<uint64_t> started_{0};
  std::atomic<uint64_t> ended_{0};
  bool closed_ = false;
};

}  // namespace rankcall
