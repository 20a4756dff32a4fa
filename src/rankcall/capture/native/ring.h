// The ring file from the writer's side: lock-free, for many threads of one process.
//
// A slot's commit word is `(index + 1) << 2 | state`. A thread that changes the state by compare-and-
// swap owns the slot until its next store: the thread that issues a record, the one that finishes it, or
// one that laps the ring and moves an unfinished record to the in-flight table.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "layout.h"

namespace rankcall {

struct Record {
  std::atomic<uint64_t> commit;
  uint64_t seq;
  int64_t enqueued_ns, started_ns, completed_ns;
  uint64_t message_bytes, in_bytes, out_bytes, correlation, step;
  double device_ms;
  int64_t tag;
  int64_t shape[layout::kMaxDims];
  uint32_t group, call_site, thread;
  int32_t root, peer;
  uint32_t error, variant, shape_hash;
  uint16_t tensors;
  int16_t device_index;
  uint8_t kind, op, dtype, reduce_op, device_type, async_op, status, flags, ndim, pad[3];
};
RANKCALL_ASSERT_LAYOUT(Record);

// The facts that are known only when an op has ended.
struct Outcome {
  uint8_t status;
  int64_t completed_ns;
  int64_t started_ns = 0;  // 0: as recorded at issue
  double device_ms = 0;
  bool has_device_ms = false;
  bool abandoned = false;
  uint32_t error = 0;
  int32_t peer = -1;  // of an any-source receive
  uint64_t seq = 0;
};

struct Geometry {
  uint64_t capacity, inflight_capacity, tables_bytes, inflight_offset, tables_offset, records_offset;
};

// Bit by bit: an entry of the side tables has some hundred bytes, and is written once.
inline uint32_t crc32(const char* data, size_t size) {
  uint32_t crc = ~0u;
  for (size_t i = 0; i < size; i++) {
    crc ^= static_cast<uint8_t>(data[i]);
    for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (0xEDB88320u & -(crc & 1));
  }
  return ~crc;
}

class Ring {
 public:
  Ring(char* base, const Geometry& geometry) : base_(base), geometry_(geometry) {}

  // Take the next index. False once the ring is closed. Every index taken must be finished once.
  bool reserve(uint64_t& index) {
    index = head_.fetch_add(1);  // in one order with the dispatcher going to sleep: see wake()
    return !(index & kClosed);
  }

  // Own the slot of `index` for writing. Null if a thread a whole lap behind still owns it: the
  // record is then dropped rather than waited for.
  Record* begin(uint64_t index) {
    Record& slot = record(index);
    const uint64_t writing = (index + 1) << 2 | layout::kWriting;
    uint64_t word = slot.commit.load(std::memory_order_relaxed);
    // The other thread makes a few stores. If the kernel has taken the processor away from it in between,
    // the record is dropped: the issuing thread waits for nobody.
    for (int spins = 0; spins < 1000; spins++) {
      switch (word & 3) {
        case layout::kWriting:
          if (word != 0) return nullptr;
          [[fallthrough]];
        case layout::kDone:
          if (slot.commit.compare_exchange_weak(word, writing, std::memory_order_acquire)) return owned(slot);
          break;
        case layout::kOpen:
          if (slot.commit.compare_exchange_weak(word, word & ~3ull, std::memory_order_acquire)) {
            park(slot, word);
            slot.commit.store(writing, std::memory_order_relaxed);
            return owned(slot);
          }
          break;
        default:  // being finished on another thread: a few stores
          word = slot.commit.load(std::memory_order_relaxed);
      }
    }
    return nullptr;
  }

  void publish(Record* slot, uint64_t index) {
    slot->commit.store((index + 1) << 2 | layout::kOpen, std::memory_order_release);
    field<uint64_t>(layout::kHead).store(index + 1, std::memory_order_relaxed);
    // The next slot was touched a whole lap ago: fetch it now rather than stall on it then.
    const char* next = reinterpret_cast<const char*>(&record(index + 1));
    for (size_t line = 0; line < sizeof(Record); line += 64) __builtin_prefetch(next + line, 1);
  }

  // Finish a reserved index, wherever its record is by now. After this the ring may be freed.
  //
  // If another thread is in the middle of changing the record (it was preempted there), the end is
  // kept, and finish_late() writes it: a lost end would look like a hang.
  void finish(uint64_t index, const Outcome& outcome) {
    if (told_) told_(told_context_, index);
    bool busy = false;
    if (Record* slot = claim(index, busy)) write_end(slot, index, outcome);
    else if (busy && keep_late(index, outcome)) return;
    done_.fetch_add(1);  // ordered as head_ is
  }

  // Write the ends that found their record being changed. For the native thread, now and then.
  void finish_late() {
    if (!has_late_.exchange(false)) return;
    std::vector<std::pair<uint64_t, Outcome>> late;
    {
      std::lock_guard<std::mutex> lock(late_mutex_);
      late.swap(late_);
    }
    for (const auto& [index, outcome] : late) {
      bool busy = false;
      if (Record* slot = claim(index, busy)) write_end(slot, index, outcome);
      else if (busy && keep_late(index, outcome)) continue;
      done_.fetch_add(1);
    }
  }

  // Note that an op has begun on its device; 0: that it has not; or what is not known.
  void start(uint64_t index, int64_t started_ns) {
    bool busy = false;
    if (Record* slot = claim(index, busy)) {
      slot->flags &= ~(layout::kFlagNotStarted | layout::kFlagAbandoned);
      if (started_ns == layout::kEndUnknown) {
        slot->flags |= layout::kFlagAbandoned;
      } else if (started_ns > 0) {
        slot->started_ns = started_ns;
        slot->status = layout::kStarted;
      } else if (!started_ns) {
        slot->flags |= layout::kFlagNotStarted;
      }
      slot->commit.store((index + 1) << 2 | layout::kOpen, std::memory_order_release);
    }
  }

  // Note how long an op took on its device, before or after its end has been noticed.
  void note_device_ms(uint64_t index, double device_ms) {
    bool busy = false;
    if (Record* slot = claim(index, busy)) {
      slot->device_ms = device_ms;
      slot->commit.store((index + 1) << 2 | layout::kOpen, std::memory_order_release);
      return;
    }
    Record& slot = record(index);
    uint64_t word = (index + 1) << 2 | layout::kDone;
    if (!slot.commit.compare_exchange_strong(word, (index + 1) << 2 | layout::kClosing, std::memory_order_acquire)) return;
    owned(slot)->device_ms = device_ms;
    slot.commit.store((index + 1) << 2 | layout::kDone, std::memory_order_release);
  }

  // Add a side-table entry; returns its id, 0 if there is no more room. A part of the room is kept
  // for groups: a record of an unknown group is of no use.
  uint32_t append(uint32_t kind, const std::string& payload) {
    std::lock_guard<std::mutex> lock(tables_mutex_);
    return append_locked(kind, payload, room_beside_groups());
  }

  // Add a group. If there is no more room the group gets a number all the same, which no entry
  // explains: its records stay apart from those of other groups.
  uint32_t append_group(const std::string& payload) {
    std::lock_guard<std::mutex> lock(tables_mutex_);
    const uint32_t id = append_locked(layout::kEntryGroup, payload, geometry_.tables_bytes);
    return id ? id : layout::kUnlistedGroups + unlisted_groups_++ % layout::kUnlistedGroups;
  }

  // The id of an error message. A retry loop can fail with ever new texts, so their share is small.
  uint32_t error(const std::string& message) {
    const std::string text = message.substr(0, layout::kMostErrorBytes);
    std::lock_guard<std::mutex> lock(tables_mutex_);
    auto known = errors_.find(text);
    if (known != errors_.end()) return known->second;
    if (errors_bytes_ + text.size() > geometry_.tables_bytes / layout::kErrorsShare) {
      field<uint64_t>(layout::kTablesLost).fetch_add(1, std::memory_order_relaxed);
      return 0;
    }
    errors_bytes_ += text.size();
    return errors_[text] = append_locked(layout::kEntryString, text, room_beside_groups());
  }

  // Have a function called with each record that is finished. To be set before the first.
  void tell(void (*told)(void*, uint64_t), void* context) { told_ = told, told_context_ = context; }

  // No index is taken from now on. To be called once.
  void close() { closed_head_ = head_.fetch_or(kClosed); }
  uint64_t head() const { return head_.load() & ~kClosed; }
  uint64_t done() const { return done_.load(); }
  bool drained() const { return closed_head_ == done(); }

  template <typename T>
  std::atomic<T>& field(size_t offset) {
    return *reinterpret_cast<std::atomic<T>*>(base_ + offset);
  }

 private:
  static constexpr uint64_t kClosed = 1ull << 63;

  Record& record(uint64_t index) {
    return reinterpret_cast<Record*>(base_ + geometry_.records_offset)[index & (geometry_.capacity - 1)];
  }
  Record* parked() { return reinterpret_cast<Record*>(base_ + geometry_.inflight_offset); }

  // A reader that sees a store after this one must also see the word that announces it.
  static Record* owned(Record& record) {
    std::atomic_thread_fence(std::memory_order_release);
    return &record;
  }

  static void write_end(Record* slot, uint64_t index, const Outcome& outcome) {
    slot->completed_ns = outcome.completed_ns;
    if (outcome.started_ns) slot->started_ns = outcome.started_ns;
    if (outcome.has_device_ms) slot->device_ms = outcome.device_ms;
    if (outcome.abandoned) slot->flags |= layout::kFlagAbandoned;
    if (outcome.error) slot->error = outcome.error;
    if (outcome.seq) slot->seq = outcome.seq, slot->peer = outcome.peer;
    slot->status = outcome.status;
    slot->commit.store((index + 1) << 2 | layout::kDone, std::memory_order_release);
  }

  bool keep_late(uint64_t index, const Outcome& outcome) noexcept {
    try {
      std::lock_guard<std::mutex> lock(late_mutex_);
      if (late_.size() >= kMostLate) return false;
      late_.emplace_back(index, outcome);
      has_late_ = true;
      return true;
    } catch (...) {
      return false;
    }
  }

  // Own an open record for its completion fields: in its slot, or in the in-flight table. Null if it
  // was finished before, was never written, or is `busy`: another thread is changing it.
  Record* claim(uint64_t index, bool& busy) {
    const uint64_t open = (index + 1) << 2 | layout::kOpen;
    const uint64_t closing = (index + 1) << 2 | layout::kClosing;
    for (int tries = 0; tries < 1000; tries++) {
      Record& slot = record(index);
      uint64_t word = open;
      if (slot.commit.compare_exchange_strong(word, closing, std::memory_order_acquire)) return owned(slot);
      if (word >> 2 == index + 1 && (word & 3) != layout::kWriting && (word & 3) != layout::kClosing)
        return nullptr;  // finished before
      if (word >> 2 != index + 1) {
        for (uint64_t i = 0; i < geometry_.inflight_capacity; i++) {
          word = open;
          Record& place = parked()[i];
          if (place.commit.load(std::memory_order_relaxed) == open &&
              place.commit.compare_exchange_strong(word, closing, std::memory_order_acquire))
            return owned(place);
        }
        return nullptr;  // never written, or lost when the table was full
      }
      sched_yield();  // it is being moved, or its start is being noted
    }
    busy = true;
    return nullptr;
  }

  void park(const Record& slot, uint64_t word) {
    for (uint64_t i = 0; i < geometry_.inflight_capacity; i++) {
      Record& place = parked()[next_parking_.fetch_add(1, std::memory_order_relaxed) %
                               geometry_.inflight_capacity];
      uint64_t old = place.commit.load(std::memory_order_relaxed);
      if (old != 0 && (old & 3) != layout::kDone) continue;
      if (!place.commit.compare_exchange_strong(old, word & ~3ull, std::memory_order_acquire)) continue;
      owned(place);
      constexpr size_t kBody = offsetof(Record, seq);
      std::memcpy(reinterpret_cast<char*>(&place) + kBody, reinterpret_cast<const char*>(&slot) + kBody,
                  sizeof(Record) - kBody);
      place.commit.store(word, std::memory_order_release);
      return;
    }
    field<uint64_t>(layout::kInflightLost).fetch_add(1, std::memory_order_relaxed);
  }

  uint64_t room_beside_groups() const {
    return geometry_.tables_bytes - geometry_.tables_bytes / layout::kGroupsShare;
  }

  uint32_t append_locked(uint32_t kind, const std::string& payload, uint64_t room) {
    const size_t entry = 16 + (payload.size() + 7) / 8 * 8;
    if (tables_used_ + entry > room) {
      field<uint64_t>(layout::kTablesLost).fetch_add(1, std::memory_order_relaxed);
      return 0;
    }
    char* at = base_ + geometry_.tables_offset + tables_used_;
    std::memcpy(at + 16, payload.data(), payload.size());
    const uint32_t words[4] = {++entries_, kind, static_cast<uint32_t>(payload.size()),
                               crc32(payload.data(), payload.size())};
    std::memcpy(at, words, sizeof(words));
    tables_used_ += entry;
    field<uint64_t>(layout::kTablesUsed).store(tables_used_, std::memory_order_release);
    return entries_;
  }

  char* base_;
  Geometry geometry_;
  alignas(64) std::atomic<uint64_t> head_{0};
  alignas(64) std::atomic<uint64_t> done_{0};
  alignas(64) std::atomic<uint64_t> next_parking_{0};
  uint64_t closed_head_ = ~0ull;
  void (*told_)(void*, uint64_t) = nullptr;
  void* told_context_ = nullptr;
  std::mutex tables_mutex_;
  uint64_t tables_used_ = 0;
  uint32_t entries_ = 0;
  uint32_t unlisted_groups_ = 0;
  uint64_t errors_bytes_ = 0;
  std::unordered_map<std::string, uint32_t> errors_;

  static constexpr size_t kMostLate = 4096;  // each needs a thread that was preempted in a few stores
  std::mutex late_mutex_;
  std::atomic<bool> has_late_{false};
  std::vector<std::pair<uint64_t, Outcome>> late_;
};

}  // namespace rankcall
