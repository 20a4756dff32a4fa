// The other workers, as one agent knows them.
#pragma once

#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "calls.h"

namespace rankcall {

namespace rpc = torch::distributed::rpc;
using Future = c10::intrusive_ptr<rpc::JitFuture>;

struct Peer {
  Peer(std::string name, int64_t id, uint64_t session, std::string arena, int pid,
       int64_t max_bytes)
      : info(std::move(name), id),
        session(session),
        arena(std::move(arena)),
        pid(pid),
        max_bytes(max_bytes) {}

  const rpc::WorkerInfo info;
  const uint64_t session;
  const std::string arena;  // what its block files' paths begin with; empty on another host
  const int pid;            // 0 on another host
  const int64_t max_bytes;  // the largest frame that it takes

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

using Call = CallOf<Future, Peer>;
using Calls = CallsOf<Call>;

}  // namespace rankcall
