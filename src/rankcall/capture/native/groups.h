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

  Group(const c10::intrusive_ptr<c10d::ProcessGroup>& group, uint32_t id)
      : alive(group), id(id), rank(group->getRank()), size(group->getSize()) {}

  // The next sequence number for (source, destination, tag); `outgoing`: this rank is the source.
  uint64_t next_p2p(int peer, int64_t tag, bool outgoing) {
    std::lock_guard<std::mutex> lock(mutex_);
    return ++p2p_[{peer, tag, outgoing}];
  }

 private:
  std::mutex mutex_;
  std::map<std::tuple<int, int64_t, bool>, uint64_t> p2p_;
};

class Groups {
 public:
  explicit Groups(Ring& ring) : ring_(ring) {}

  // Announce a group under the name torch gave it; the next new group of that name is it.
  uint32_t announce(const std::string& name, const std::string& payload) {
    const uint32_t id = ring_.append(layout::kEntryGroup, payload);
    std::lock_guard<std::mutex> lock(mutex_);
    announced_[name] = id;
    return id;
  }

  // The state of a group; never null. The caller holds a reference to the process group.
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

 private:
  Group* find_slow(c10d::ProcessGroup* group) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto known = groups_.find(group);
    if (known != groups_.end()) return known->second.get();
    forget_destroyed();
    auto added = std::make_unique<Group>(
        c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(group), id_of(*group));
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

  uint32_t id_of(c10d::ProcessGroup& group) {
    std::string name, backend = "custom";
    try {
      name = group.getGroupName();
    } catch (const std::exception&) {
      name = "unnamed";  // made by hand, not through torch.distributed
    }
    auto known = announced_.find(name);
    if (known != announced_.end()) return known->second;
    try {
      backend = group.getBackendName();
    } catch (const std::exception&) {
    }
    return ring_.append(layout::kEntryGroup,
                        "{\"name\": " + json_text(name.c_str()) + ", \"epoch\": 0, \"backend\": " +
                            json_text(backend.c_str()) + ", \"description\": \"\", \"ranks\": []}");
  }

  // Never the same number twice in a process, so that no thread trusts another recorder's pointer.
  static std::atomic<uint64_t>& generations() {
    static std::atomic<uint64_t> count{1};
    return count;
  }

  Ring& ring_;
  std::mutex mutex_;
  std::atomic<uint64_t> generation_{++generations()};
  std::unordered_map<const void*, std::unique_ptr<Group>> groups_;
  std::unordered_map<std::string, uint32_t> announced_;
};

}  // namespace rankcall
