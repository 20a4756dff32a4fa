// Call a tool at the issue of each op, on the issuing thread. FallbackMarks in capture/marks.py does
// the same for the fallback capture. The fields of a mark, their names and their order are generated
// from drop_in.py; a test compares both captures' marks with the descriptions that follow them.
//
// The tool's C functions come from outside (nvtx_bridge.cpp), so the recorder needs no header of
// theirs. Off, it costs a load. On, a text is made of parts that Python has prepared, under a lock;
// a thread that holds this lock never takes the GIL.
#pragma once

#include <atomic>
#include <charconv>
#include <cstdint>
#include <ctime>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "ring.h"

namespace rankcall {

class Marks {
 public:
  struct Functions {
    void (*mark)(const char*) = nullptr;
    uint64_t (*begin)(const char*) = nullptr;
    void (*end)(uint64_t) = nullptr;
  };
  struct Settings {
    std::string gpu_serial, vm_id;               // JSON
    std::vector<std::string> dtypes;             // by code
    std::unordered_map<std::string, std::string> names;  // public ones, by c10d op
    std::unordered_set<std::string> object_calls;
    std::string batch;
    uint8_t pickles = 0;
    bool across_only = false;
  };
  struct GroupText {
    std::string label, ranks_text;  // JSON
    std::vector<int32_t> ranks;
    int32_t me = -1;
    bool crosses = true;
    std::string elsewhere;  // a byte a member
  };

  explicit Marks(uint64_t capacity) : mask_(capacity - 1) {}

  void add_site(uint32_t id, std::string source, std::string api) {
    std::lock_guard<std::mutex> lock(mutex_);
    sites_[id] = {std::move(source), std::move(api)};
  }
  void add_group(uint32_t id, GroupText text) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (groups_.size() >= kMostGroups) groups_.erase(groups_.begin());
    groups_[id] = std::move(text);
  }
  void set_span(uint32_t id, bool crosses, std::string elsewhere) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto group = groups_.find(id);
    if (group == groups_.end()) return;
    group->second.crosses = crosses;
    group->second.elsewhere = std::move(elsewhere);
  }
  void add_numels(uint32_t shape_hash, std::vector<int64_t> numels) {
    std::lock_guard<std::mutex> lock(mutex_);
    numels_[shape_hash] = std::move(numels);
  }

  void turn_on(Functions functions, Settings settings) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!ranges_) ranges_ = std::make_unique<std::atomic<uint64_t>[]>(mask_ + 1);
    functions_ = functions;
    settings_ = std::move(settings);
    ever_on_.store(true, std::memory_order_release);
    on_.store(true, std::memory_order_release);
  }
  // Ranges that are open still end.
  void turn_off() { on_.store(false); }

  bool on() const { return on_.load(std::memory_order_acquire); }

  // Mark an op, and begin its range if it runs on the CPU.
  void issued(const Record& record, uint64_t index, const std::string& variant, int32_t rank) noexcept {
    if (!on()) return;
    try {
      std::lock_guard<std::mutex> lock(mutex_);
      static const GroupText unknown_group;
      static const Site unknown_site;
      const auto its_group = groups_.find(record.group);
      const auto its_site = sites_.find(record.call_site);
      const GroupText& group = its_group == groups_.end() ? unknown_group : its_group->second;
      const Site& site = its_site == sites_.end() ? unknown_site : its_site->second;
      const bool is_object = settings_.object_calls.count(site.api) != 0;
      if (is_object && record.dtype != settings_.pickles) return;  // their lengths
      if (layout::kRootDescribes[record.op] && group.me >= 0 && record.root != group.me) return;
      if (settings_.across_only && !crosses(record, group)) return;
      const auto known = settings_.names.find(variant);
      const std::string& name = is_object ? site.api : known != settings_.names.end() ? known->second : variant;
      mark_each(record, name, site, group, rank);
      // The end of an op on a device is noticed up to two seconds late. A range that ends then would show
      // a time that the op did not take.
      if (record.flags & layout::kFlagDevice) return;
      const uint64_t old = ranges_[index & mask_].exchange(functions_.begin(name.c_str()));
      if (old) functions_.end(old);  // of an op that the ring has lapped
    } catch (...) {
    }
  }

  // End the range of an op.
  void ended(uint64_t index) noexcept {
    if (!ever_on_.load(std::memory_order_acquire)) return;
    const uint64_t range = ranges_[index & mask_].exchange(0);
    if (range) functions_.end(range);
  }

 private:
  struct Site {
    std::string source = "\"unknown\"";  // JSON
    std::string api;
  };

  static bool crosses(const Record& record, const GroupText& group) {
    const auto peer = static_cast<size_t>(record.peer);
    if (record.peer < 0 || peer >= group.elsewhere.size()) return group.crosses;
    return group.elsewhere[peer] != 0;
  }

  // What the fields of a mark are made of.
  struct Marked {
    const Record& record;
    const std::string& name;
    const Site& site;
    const GroupText& group;
    int32_t rank;
    uint64_t bytes;
    bool together;  // the op is one of several that a call has issued
  };

  // One mark, or one for each tensor of a coalesced op.
  void mark_each(const Record& record, const std::string& name, const Site& site, const GroupText& group,
                 int32_t rank) {
    const auto numels = record.tensors > 1 ? numels_.find(record.shape_hash) : numels_.end();
    if (numels == numels_.end() || numels->second.size() != record.tensors) {
      mark({record, name, site, group, rank, record.message_bytes, site.api == settings_.batch});
      return;
    }
    int64_t total = 0;
    for (const int64_t numel : numels->second) total += numel;
    for (const int64_t numel : numels->second) {
      const auto size = static_cast<unsigned __int128>(record.message_bytes) * static_cast<uint64_t>(numel);
      const auto share = static_cast<uint64_t>(size / static_cast<uint64_t>(total ? total : 1));
      mark({record, name, site, group, rank, share, true});
    }
  }

  void mark(const Marked& op) {
    thread_local std::string text;
    text.assign("{");
    for (const auto& field : layout::kDescription) {
      if (!applies(field.fact, op)) continue;
      if (text.size() > 1) text.append(", ");
      value(text.append(field.key), field.fact, op);
    }
    functions_.mark(text.append("}").c_str());
  }

  static bool applies(layout::Fact fact, const Marked& op) {
    switch (fact) {
      case layout::Fact::kPeer: return is_member(op.record.peer, op.group);
      case layout::Fact::kRoot: return is_member(op.record.root, op.group);
      case layout::Fact::kCorrelation: return op.together;
      case layout::Fact::kEndUnknown: return false;  // of a mark, it says nothing
      default: return true;
    }
  }

  // Append the JSON of a fact. Without a default, the compiler warns of a fact that has no case.
  void value(std::string& text, layout::Fact fact, const Marked& op) const {
    const Record& record = op.record;
    switch (fact) {
      case layout::Fact::kOp: text.append("\"").append(op.name).append("\""); return;
      case layout::Fact::kRank: return number(text, op.rank);
      case layout::Fact::kCallSite: text.append(op.site.source); return;
      case layout::Fact::kMessageBytes: return number(text, op.bytes);
      case layout::Fact::kDeviceIndex:
        if (record.device_index < 0) text.append("\"cpu\"");
        else number(text, record.device_index);
        return;
      case layout::Fact::kEnqueuedEpochNs: return number(text, static_cast<int64_t>(std::time(nullptr)));  // in s
      case layout::Fact::kGpuSerial: text.append(settings_.gpu_serial); return;
      case layout::Fact::kVmId: text.append(settings_.vm_id); return;
      case layout::Fact::kGroupRanks: text.append(op.group.ranks_text); return;
      case layout::Fact::kPeer: return number(text, op.group.ranks[static_cast<size_t>(record.peer)]);
      case layout::Fact::kRoot: return number(text, op.group.ranks[static_cast<size_t>(record.root)]);
      case layout::Fact::kCorrelation: return number(text, record.correlation);
      case layout::Fact::kSeq: return number(text, record.seq);
      case layout::Fact::kGroup: text.append(op.group.label); return;
      case layout::Fact::kDtype:
        text.append("\"");
        if (record.dtype < settings_.dtypes.size()) text.append(settings_.dtypes[record.dtype]);
        text.append("\"");
        return;
      case layout::Fact::kDurationMs:  // known when the op ends
      case layout::Fact::kAlgbwGbps:
      case layout::Fact::kBusbwGbps: text.append("null"); return;
      case layout::Fact::kStep: return number(text, record.step);
      case layout::Fact::kEndUnknown: text.append("null"); return;
    }
  }

  template <typename Integer>
  static void number(std::string& text, Integer value) {
    char digits[24];
    text.append(digits, std::to_chars(digits, digits + sizeof(digits), value).ptr);
  }
  static bool is_member(int32_t local, const GroupText& group) {
    return local >= 0 && static_cast<size_t>(local) < group.ranks.size();
  }

  static constexpr size_t kMostGroups = 4096;  // a program may make groups without end

  const uint64_t mask_;
  std::atomic<bool> on_{false}, ever_on_{false};
  std::mutex mutex_;
  Functions functions_;
  Settings settings_;
  std::unordered_map<uint32_t, Site> sites_;
  std::unordered_map<uint32_t, GroupText> groups_;
  std::unordered_map<uint32_t, std::vector<int64_t>> numels_;
  std::unique_ptr<std::atomic<uint64_t>[]> ranges_;  // by record, modulo the ring's capacity
};

}  // namespace rankcall
