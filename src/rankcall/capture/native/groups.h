// Process groups as the kernels meet them: sequence counters, and the side-table id of each.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <unordered_map>

#include "callsite.h"
#include "ring.h"
#include "thread.h"

namespace rankcall {

struct Group {
  // A weak reference keeps the address from being used again, so it is the group's identity.
  c10::weak_intrusive_ptr<c10d::ProcessGroup> alive;
  uint32_t id;
  int rank, size;
  std::atomic<uint64_t> collectives{0};
  // As another back end has the group, which runs what is on the CPU and counts for itself; may be null.
  std::shared_ptr<Group> on_host;

  // True for the first caller.
  bool is_first() { return !met_.load(std::memory_order_relaxed) && !met_.exchange(true); }

  // Whether ops on this kind of device are over when their Work says so, because the back end copies
  // to the host and back. Else the Work says only that they are enqueued.
  bool ends_on_host(c10d::ProcessGroup& group, c10::Device device) {
    Where where = where_.load(std::memory_order_relaxed);
    if (where == kUnknown) {
      where = kOnDevice;
      try {
        const std::string backend = group.getBackend(device.type())->getBackendName();
        if (backend == "gloo" || backend == "mpi") where = kOnHost;
      } catch (const std::exception&) {
      }
      where_.store(where, std::memory_order_relaxed);
    }
    return where == kOnHost;
  }

  Group(const c10::intrusive_ptr<c10d::ProcessGroup>& group, uint32_t id)
      : alive(group), id(id), rank(group->getRank()), size(group->getSize()) {}

  // The next sequence number for (source, destination, tag); `outgoing`: this rank is the source.
  //
  // A program may use a new tag for every message, so the counters are bounded: once kMostCounters
  // are in use, those that were not used since the last time this happened start again from 1.
  uint64_t next_p2p(int peer, int64_t tag, bool outgoing) {
    const Channel channel{peer, tag, outgoing};
    std::lock_guard<std::mutex> lock(mutex_);
    if (recent_.size() >= kMostCounters && !recent_.count(channel)) {
      older_ = std::move(recent_);
      recent_.clear();
    }
    uint64_t& counter = recent_[channel];
    if (counter == 0) {
      const auto known = older_.find(channel);
      if (known != older_.end()) counter = known->second;
    }
    return ++counter;
  }

 private:
  enum Where : uint8_t { kUnknown, kOnHost, kOnDevice };
  using Channel = std::tuple<int, int64_t, bool>;
  static constexpr size_t kMostCounters = 8192;

  std::atomic<bool> met_{false};
  std::atomic<Where> where_{kUnknown};
  std::mutex mutex_;
  std::map<Channel, uint64_t> recent_, older_;
};

class Groups {
 public:
  explicit Groups(Ring& ring) : ring_(ring) {}

  // Announce a group under the name torch gave it; the next new group of that name is it.
  uint32_t announce(const std::string& name, const std::string& payload) {
    const uint32_t id = ring_.append_group(payload);
    std::lock_guard<std::mutex> lock(mutex_);
    if (announced_.size() >= kMostAnnounced) announced_.clear();  // groups that no op was issued on
    announced_[name] = id;
    return id;
  }

  // The state of a group; never null. It stays valid for as long as the caller holds a reference to
  // the process group; `shared` returns one that stays valid for longer.
  Group* find(c10d::ProcessGroup* group) {
    Thread& thread = this_thread();
    const uint64_t generation = generation_.load(std::memory_order_acquire);
    if (thread.group_key == group && thread.group_generation == generation)
      return static_cast<Group*>(thread.group);
    Group* found = find_slow(group);
    thread.group = found;
    thread.group_key = group;
    thread.group_generation = generation_.load(std::memory_order_acquire);
    return found;
  }

  std::shared_ptr<Group> shared(c10d::ProcessGroup* group, bool on_host) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto known = groups_.find(group);
    if (known == groups_.end()) return nullptr;
    return on_host && known->second->on_host ? known->second->on_host : known->second;
  }

 private:
  Group* find_slow(c10d::ProcessGroup* group) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto known = groups_.find(group);
    if (known != groups_.end()) return known->second.get();
    forget_destroyed();
    const auto held = c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(group);
    const std::string name = name_of(*group);
    auto added = std::make_shared<Group>(held, id_of(*group, name));
    const auto on_host = announced_.find(name + "/cpu");
    if (on_host != announced_.end()) {
      added->on_host = std::make_shared<Group>(held, on_host->second);
      announced_.erase(on_host);
    }
    return (groups_[group] = std::move(added)).get();
  }

  void forget_destroyed() {
    for (auto it = groups_.begin(); it != groups_.end();) {
      if (it->second->alive.expired()) {
        it = groups_.erase(it);
        generation_ = ++generations();
      } else {
        ++it;
      }
    }
  }

  static std::string name_of(c10d::ProcessGroup& group) {
    try {
      return group.getGroupName();
    } catch (const std::exception&) {
      return "unnamed";  // made by hand, not through torch.distributed
    }
  }

  uint32_t id_of(c10d::ProcessGroup& group, const std::string& name) {
    std::string backend = "custom";
    const auto known = announced_.find(name);
    if (known != announced_.end()) {
      const uint32_t id = known->second;
      announced_.erase(known);  // a program that makes groups in a loop must not make this grow
      return id;
    }
    try {
      backend = group.getBackendName();
    } catch (const std::exception&) {
    }
    return ring_.append_group("{\"name\": " + json_text(name.c_str()) + ", \"epoch\": 0, \"backend\": " +
                              json_text(backend.c_str()) + ", \"description\": \"\", \"ranks\": []}");
  }

  // Never the same number twice in a process, so that no thread trusts another recorder's pointer.
  static std::atomic<uint64_t>& generations() {
    static std::atomic<uint64_t> count{1};
    return count;
  }

  static constexpr size_t kMostAnnounced = 16384;

  Ring& ring_;
  std::mutex mutex_;
  std::atomic<uint64_t> generation_{++generations()};
  std::unordered_map<const void*, std::shared_ptr<Group>> groups_;
  std::unordered_map<std::string, uint32_t> announced_;
};

}  // namespace rankcall
