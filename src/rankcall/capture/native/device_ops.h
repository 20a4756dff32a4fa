// Ops on devices whose end is still to come.
//
// The issuing thread writes down which number the back end gave an op, and whether the future of the
// op's Work will end its record. About once a second capture/device_status.py takes these notes,
// and finds out from the back end's status which of the others have completed. No stream and no
// event of a device is touched.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_set>
#include <utility>
#include <vector>

namespace rankcall {

struct DeviceOp {
  uint64_t index;   // of its record
  uint32_t group;   // side-table id
  int64_t number;   // its sequence number in the back end, of a collective or of p2p; or kNoNumber
  bool p2p;
  uint64_t block;   // ops of one public call, which may share a number
  bool watched;     // its Work's future ends its record
  uint64_t stream;  // the caller's, 0 if not known
  bool in_stream;   // it runs in that stream
  static constexpr int64_t kNoNumber = -1;
};

class DeviceOps {
 public:
  // False if the notes are full, because they have not been taken for a long time.
  bool add(const DeviceOp& op) noexcept {
    try {
      std::lock_guard<std::mutex> lock(mutex_);
      if (ops_.size() >= kMost) return false;
      ops_.push_back(op);
      uint64_t& place = open_[op.index % kPlaces];
      if (place && older_.size() < kMost) older_.insert(place - 1);
      place = op.index + 1;
      return true;
    } catch (...) {
      return false;
    }
  }

  // The notes until now. There is room for as many until the next call, so that `add` seldom allocates.
  std::vector<DeviceOp> take() {
    std::vector<DeviceOp> taken;
    try {
      taken.reserve(taken_);
    } catch (...) {  // no memory: `add` will ask for it
    }
    std::lock_guard<std::mutex> lock(mutex_);
    taken.swap(ops_);
    taken_ = taken.size();
    return taken;
  }

  // Whether the caller is the one to end an op's record. A future and device_status.py may find at the
  // same time that an op is over, and a record ends once.
  bool claim(uint64_t index) noexcept {
    std::lock_guard<std::mutex> lock(mutex_);
    return claim_locked(index);
  }

  // The same for a future, whose ends device_status.py is told.
  bool claim_by_future(uint64_t index) noexcept {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!claim_locked(index)) return false;
    try {
      ended_.push_back(index);  // as many as were noted at most
    } catch (...) {
    }
    return true;
  }

  std::vector<uint64_t> take_ended() {
    std::vector<uint64_t> taken;
    std::lock_guard<std::mutex> lock(mutex_);
    taken.swap(ended_);
    return taken;
  }

 private:
  // kMost: notes that nobody takes, because the heartbeat's thread is stuck, must not fill the memory.
  // kPlaces: more than are in flight as a rule; 64 KiB.
  static constexpr size_t kMost = 1 << 16, kPlaces = 1 << 13;

  bool claim_locked(uint64_t index) noexcept {
    uint64_t& place = open_[index % kPlaces];
    if (place != index + 1) return older_.erase(index) != 0;
    place = 0;
    return true;
  }

  std::mutex mutex_;
  std::vector<DeviceOp> ops_;
  size_t taken_ = 0;  // by the last call of take()
  std::vector<uint64_t> ended_;
  // The ops whose records have not ended, by index + 1, each at its place. A set of all of them would
  // allocate at each issue. The few that are still open when their place is needed are in `older_`.
  std::vector<uint64_t> open_ = std::vector<uint64_t>(kPlaces);
  std::unordered_set<uint64_t> older_;
};

}  // namespace rankcall
