// Ops on devices whose end is still to come.
//
// The issuing thread writes down which number the back end gave an op. About once a second
// capture/device_status.py takes these notes, compares them with what the back end says it has
// completed, and ends the records. No stream, event or future of a device is touched.
#pragma once

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace rankcall {

struct DeviceOp {
  uint64_t index;   // of its record
  uint32_t group;   // side-table id
  int64_t number;   // its sequence number in the back end, of a collective or of p2p; or kNoNumber
  bool p2p;
  uint64_t block;   // ops of one public call, which may share a number
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
      return true;
    } catch (...) {
      return false;
    }
  }

  std::vector<DeviceOp> take() {
    std::vector<DeviceOp> taken;
    std::lock_guard<std::mutex> lock(mutex_);
    taken.swap(ops_);
    return taken;
  }

 private:
  static constexpr size_t kMost = 1 << 16;
  std::mutex mutex_;
  std::vector<DeviceOp> ops_;
};

}  // namespace rankcall
