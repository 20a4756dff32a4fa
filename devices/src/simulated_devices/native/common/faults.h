// Faults on order: what a file says is wrong with the devices, re-read while the job runs.
//
// The file is `faults` in the folder SIMULATED_DEVICES_FAULTS. Each line is one fault:
//     ID KIND key=value ...
// `devices fault` replaces the whole file by rename, so a reader never sees half of it.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace simulated {

struct Fault {
  enum Kind { Stall, Slow, Link, Xid, Ecc, Oom, Network, Init };
  Kind kind;
  int rank = -1;          // -1: every rank
  int device = -1;        // -1: every device of the rank
  int peer = -1;          // of a link: the rank at its other end; -1: every rank
  int64_t from_op = 0;    // strikes NCCL ops from this number on; the first op of a device has number 1
  double factor = 1;      // of a slow device
  int code = 0;           // of an Xid
  int64_t bytes = 0;      // of an out of memory: what can still be allocated
  bool every_op = false;  // of a stall: also copies and kernels, not only NCCL's ops
};

// The faults of this process, by what asks for them. All calls are cheap when no fault is ordered.
class FaultBoard {
 public:
  static FaultBoard& get();

  // Reads the file again, for a caller that asks seldom and follows nothing.
  void refresh() { reload(); }
  // The Xid of a device of this machine, 0 for none, whichever rank uses it.
  int xid_on_this_host(int device) const;

  // Reads the file now and starts to follow it. `changed` runs in the follower's thread after each change.
  void follow(std::function<void()> changed);

  bool stalls_nccl(int device, int64_t op) const;
  bool stalls_everything(int device) const;
  double slowness(int device) const;
  bool stalls_link(int rank, int peer) const;
  bool stalls_init() const;
  bool breaks_network(int device, int64_t op) const;
  // True if the device is lost; says with which CUDA error its calls fail and which Xid NVML reports.
  bool lost(int device, int* cuda_error, int* xid) const;
  // The bytes that allocations on the device may use in all, `memory` if no fault limits them.
  int64_t memory_limit(int device, int64_t memory) const;

 private:
  using Faults = std::vector<Fault>;
  std::shared_ptr<const Faults> current() const;
  const Fault* find(const Faults& faults, Fault::Kind kind, int device, int64_t op = 1ll << 62) const;
  bool any(Fault::Kind kind, int device, int64_t op) const;
  bool reload();
  void run(std::function<void()> changed);

  std::shared_ptr<const Faults> faults_ = std::make_shared<Faults>();
  std::mutex reading_;
  std::string read_text_;
  bool followed_ = false;
};

}  // namespace simulated
