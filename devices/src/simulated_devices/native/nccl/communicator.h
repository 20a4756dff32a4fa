// One rank's end of a communicator.
//
// NCCL runs the operations of a communicator in the order of their launches, on whatever streams they
// are. So each launch takes a ticket, and an operation first waits for its turn.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../abi/nccl.h"
#include "wire.h"

namespace simulated {

struct Task {
  enum Kind { AllReduce, Broadcast, Reduce, AllGather, ReduceScatter, AllToAll, Gather, Scatter, Send, Recv };
  Kind kind;
  const char* in;
  char* out;
  size_t count;
  ncclDataType_t type;
  int op = ncclSum;
  int root = 0;  // of a message: the peer
  bool is_message() const { return kind == Send || kind == Recv; }
};

// An operator that multiplies each rank's values before it sums them.
struct PreMultiply {
  ncclDataType_t type;
  double value = 0;
  const void* device_scalar = nullptr;  // read when the collective runs
};

class Communicator {
 public:
  Communicator(std::string id, int size, int rank, int device, bool blocking);

  const std::string id;
  const int size, rank, device;
  const bool blocking;
  std::atomic<bool> aborted{false}, revoked{false};
  std::atomic<int> error{ncclSuccess};  // what ncclCommGetAsyncError returns

  // Joins the other ranks: first `attach`, which does not wait, then `meet`, which does.
  ncclResult_t attach();
  ncclResult_t meet();

  // Agreement among host threads of all ranks: publishes two values and returns everybody's.
  ncclResult_t agree(int64_t first, int64_t second, std::vector<std::pair<int64_t, int64_t>>* all);

  // Adds the tasks of one group to the stream.
  ncclResult_t launch(const std::shared_ptr<Communicator>& self, cudaStream_t stream, std::vector<Task> tasks);
  // Waits until all that was launched has run; false if it was aborted first.
  bool drain();
  void abort();
  void revoke();  // stops what runs, but the communicator can still be shrunk or destroyed

  int add_operator(const PreMultiply& op);
  void remove_operator(int op);
  bool find_operator(int op, PreMultiply* out);

  // Sleeps until the condition holds; false if the communicator was stopped first. Any thread of this rank.
  // An agreement of host threads goes on after a revocation, which stops only what runs on devices.
  template <class Condition>
  bool until(Condition condition, bool despite_revocation = false);

  Wire& wire() { return *wire_; }
  bool link_stalls(int peer);
  // Children of this communicator have names that all ranks derive alike.
  std::string child_name(const std::string& what);

 private:
  friend class Turn;
  void run(const std::vector<Task>& tasks, uint64_t ticket, long long number);
  bool begin(uint64_t ticket, bool wait);
  void finish(uint64_t ticket);
  void look_for_faults(long long number);
  bool peer_died();

  std::shared_ptr<Wire> wire_;
  std::atomic<bool> attached_{false};  // a non-blocking communicator can be aborted before it has its wire
  std::mutex order_lock_;
  std::condition_variable order_;
  uint64_t launched_ = 0, executed_ = 0;
  std::mutex executing_;  // held while an operation touches the wire
  std::atomic<long long> running_number_{0};
  std::mutex operators_lock_;
  std::map<int, PreMultiply> operators_;
  int next_operator_ = ncclNumOps;
  uint64_t rounds_ = 0;
  std::atomic<int> children_{0};
};
using CommunicatorPtr = std::shared_ptr<Communicator>;

// The text that ncclGetLastError returns.
void set_last_error(const std::string& text);
std::string last_error();

template <class Condition>
bool Communicator::until(Condition condition, bool despite_revocation) {
  auto stopped = [&] { return aborted || (revoked && !despite_revocation); };
  // Another rank usually answers within microseconds, which is less than a sleep costs.
  for (int spin = 0; spin < 300; ++spin) {
    if (condition()) return true;
    if (stopped()) return false;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  for (int looks = 1;; ++looks) {
    uint32_t heard = wire_->heard();
    if (condition()) return true;
    if (stopped()) return false;
    wire_->sleep(heard);
    if (looks % 4 == 0) look_for_faults(running_number_);
  }
}

}  // namespace simulated
