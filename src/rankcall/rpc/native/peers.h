// The other workers, as one agent knows them.
#pragma once

#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "calls.h"

namespace rankcall {

namespace rpc = torch::distributed::rpc;
using Future = c10::intrusive_ptr<rpc::JitFuture>;

// One life of a worker; a worker that starts again is another peer.
struct Peer {
  Peer(std::string name, int64_t id, uint64_t session, std::string endpoint, std::string slabs,
       int pid, int64_t max_bytes)
      : info(std::move(name), id),
        session(session),
        endpoint(std::move(endpoint)),
        slabs(std::move(slabs)),
        pid(pid),
        max_bytes(max_bytes) {}

  bool is_local() const { return !slabs.empty(); }

  const rpc::WorkerInfo info;
  const uint64_t session;
  const std::string endpoint;
  const std::string slabs;  // the prefix of its slabs' paths; empty on another host
  const int pid;            // 0 if it is on another host or in another pid namespace
  const int64_t max_bytes;  // the largest frame that it accepts

  std::atomic<bool> was_heard{false};  // it has sent something

  // The connection to it, guarded by the agent's connections_mutex_.
  std::string route;  // of the socket; empty if there is no connection
  bool is_up = false;
  bool was_up = false;
  Clock::time_point changed;   // when the connection was begun, or lost
  Clock::time_point close_at;  // of the connection to a peer that was given up
  std::string gone;            // why nothing is sent to it any more, or empty
};

// All peers by session, also those that are gone: torch keeps references to their WorkerInfo, and
// requests from them must be refused. The members by name and id.
class Peers {
 public:
  void add(const std::shared_ptr<Peer>& peer) {
    std::lock_guard<std::mutex> guard(mutex_);
    by_session_[peer->session] = peer;
    by_name_[peer->info.name_] = peer;
    by_id_[peer->info.id_] = peer;
  }

  // Nothing happens if a later life of that name has been added since.
  void remove(const std::string& name, uint64_t session) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = by_name_.find(name);
    if (found == by_name_.end() || found->second->session != session) return;
    by_id_.erase(found->second->info.id_);
    by_name_.erase(found);
  }

  std::shared_ptr<Peer> find_session(uint64_t session) const { return find(by_session_, session); }
  std::shared_ptr<Peer> find_id(rpc::worker_id_t id) const { return find(by_id_, id); }
  std::shared_ptr<Peer> find_name(const std::string& name) const { return find(by_name_, name); }
  std::vector<std::shared_ptr<Peer>> members() const { return values(by_id_); }
  std::vector<std::shared_ptr<Peer>> all() const { return values(by_session_); }

 private:
  template <class Map>
  std::shared_ptr<Peer> find(const Map& map, const typename Map::key_type& key) const {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = map.find(key);
    return found == map.end() ? nullptr : found->second;
  }

  template <class Map>
  std::vector<std::shared_ptr<Peer>> values(const Map& map) const {
    std::lock_guard<std::mutex> guard(mutex_);
    std::vector<std::shared_ptr<Peer>> peers;
    for (const auto& [key, peer] : map) peers.push_back(peer);
    return peers;
  }

  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<Peer>> by_session_;
  std::unordered_map<std::string, std::shared_ptr<Peer>> by_name_;
  std::map<rpc::worker_id_t, std::shared_ptr<Peer>> by_id_;
};

using Call = CallOf<Future, Peer>;
using Calls = CallsOf<Call>;

}  // namespace rankcall
