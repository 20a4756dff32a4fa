#include "communicator.h"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "../common/settings.h"
#include "../runtime/bridge.h"
#include "collectives.h"

extern "C" cudaError_t cudaGetDevice(int*);
extern "C" cudaError_t cudaSetDevice(int);

namespace simulated {
namespace {

constexpr uint64_t IN_A_GRAPH = ~0ull;  // the operations of a graph run in the order of its launches

// No kernel of NCCL is shorter, and a program may divide by its duration, which torch has in microseconds.
constexpr std::chrono::microseconds SHORTEST(2);

// NCCL operations are numbered per device from 1, in the order of their launches; a group is one.
std::atomic<long long> launched_on[64];

std::mutex& error_lock() {
  static auto* lock = new std::mutex;
  return *lock;
}
std::string& error_text() {
  static auto* text = new std::string;
  return *text;
}

// The null stream is that of the current device, and NCCL means its communicator's.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    cudaGetDevice(&before_);
    cudaSetDevice(device);
  }
  ~OnDevice() { cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

void throttle(const std::vector<Task>& tasks) {
  double gbs = settings().link_gbs;
  if (gbs <= 0) return;
  size_t bytes = 0;
  for (const Task& task : tasks) bytes += task.count * size_of(task.type);
  std::this_thread::sleep_for(std::chrono::duration<double>(bytes / (gbs * 1e9)));
}

}  // namespace

void set_last_error(const std::string& text) {
  std::lock_guard<std::mutex> hold(error_lock());
  error_text() = text;
}
std::string last_error() {
  std::lock_guard<std::mutex> hold(error_lock());
  return error_text();
}

Communicator::Communicator(std::string id, int size, int rank, int device, bool blocking)
    : id(std::move(id)), size(size), rank(rank), device(device), blocking(blocking) {}

ncclResult_t Communicator::attach() {
  std::string why;
  wire_ = Wire::open(id, size, rank, &why);
  attached_ = wire_ != nullptr;
  if (attached_) return ncclSuccess;
  set_last_error(why);
  say("a communicator of %d ranks could not be made on rank %d: %s", size, rank, why.c_str());
  return ncclSystemError;
}

ncclResult_t Communicator::meet() {
  auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(settings().init_timeout_s);
  bool late = false, died = false;
  bool met = until([&] {
    bool everybody = wire_->joined() == size;
    if (everybody && !simulated_stalls_init()) return true;
    late = std::chrono::steady_clock::now() > deadline;
    // A rank that has met all others may have ended its communicator already, which looks like a death.
    died = !everybody && peer_died();
    return late || died;
  });
  if (met && !late && !died) {
    wire_->forget_name();
    return ncclSuccess;
  }
  std::string missing;
  for (int other = 0; other < size; ++other)
    if (!wire_->member(other).joined) missing += (missing.empty() ? "" : ", ") + std::to_string(other);
  wire_->forget_name();
  if (!met) set_last_error("the communicator was aborted while it was made");
  else if (died) set_last_error("a rank ended while the communicator was made");
  else set_last_error("ranks " + missing + " of " + std::to_string(size) + " have not joined the communicator in time");
  return late ? ncclSystemError : died ? ncclRemoteError : ncclInternalError;
}

bool Communicator::peer_died() {
  for (int other = 0; other < size; ++other)
    if (wire_->member(other).joined && !wire_->alive(other)) return true;
  return false;
}

ncclResult_t Communicator::agree(int64_t first, int64_t second, std::vector<std::pair<int64_t, int64_t>>* all) {
  uint64_t round = ++rounds_;
  auto everybody = [&](std::atomic<uint64_t> Member::* counter, uint64_t least) {
    for (int other = 0; other < size; ++other)
      if ((wire_->member(other).*counter).load() < least) return false;
    return true;
  };
  // Nobody may publish over values that another rank has still to read.
  if (!until([&] { return everybody(&Member::left, round - 1); }, true)) return ncclInternalError;
  Member& own = wire_->member(rank);
  own.values[0] = first;
  own.values[1] = second;
  own.entered = round;
  for (int other = 0; other < size; ++other) wire_->ring(other);
  if (!until([&] { return everybody(&Member::entered, round); }, true)) return ncclInternalError;
  for (int other = 0; other < size; ++other)
    all->push_back({wire_->member(other).values[0], wire_->member(other).values[1]});
  own.left = round;
  for (int other = 0; other < size; ++other) wire_->ring(other);
  return ncclSuccess;
}

bool Communicator::link_stalls(int peer) {
  return simulated_stalls_link(wire_->member(rank).global_rank, wire_->member(peer).global_rank);
}

std::string Communicator::child_name(const std::string& what) {
  return id + "/" + std::to_string(++children_) + "/" + what;
}

ncclResult_t Communicator::launch(const CommunicatorPtr& self, cudaStream_t stream, std::vector<Task> tasks) {
  OnDevice guard(device);
  long long number = ++launched_on[device];
  uint64_t ticket = IN_A_GRAPH;
  if (!simulated_is_capturing(stream)) {
    std::lock_guard<std::mutex> hold(order_lock_);
    ticket = launched_++;
  }
  auto shared = std::make_shared<const std::vector<Task>>(std::move(tasks));
  Closure closure;
  closure.run = [self, shared, ticket, number] { self->run(*shared, ticket, number); };
  return enqueue(stream, false, std::move(closure)) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

bool Communicator::begin(uint64_t ticket, bool wait) {
  if (ticket == IN_A_GRAPH) return !aborted;
  std::unique_lock<std::mutex> hold(order_lock_);
  auto turn = [&] { return executed_ == ticket || aborted || revoked; };
  if (wait) order_.wait(hold, turn);
  return turn() && !aborted && !revoked;
}

void Communicator::finish(uint64_t ticket) {
  if (ticket == IN_A_GRAPH) return;
  std::lock_guard<std::mutex> hold(order_lock_);
  executed_ = std::max(executed_, ticket + 1);
  order_.notify_all();
}

void Communicator::look_for_faults(long long number) {
  if (number && simulated_breaks_network(device, number)) {
    int none = ncclSuccess;
    if (error.compare_exchange_strong(none, ncclRemoteError)) set_last_error("a network error was ordered");
  }
  if (settings().peer_death_is_error && peer_died()) {
    int none = ncclSuccess;
    if (error.compare_exchange_strong(none, ncclRemoteError)) set_last_error("the process of a rank has ended");
  }
}

void Communicator::run(const std::vector<Task>& tasks, uint64_t ticket, long long number) {
  if (begin(ticket, true)) {
    std::lock_guard<std::mutex> hold(executing_);
    running_number_ = number;
    look_for_faults(number);
    // A kernel that a fault holds back, or whose network is broken, ends only if the communicator is aborted.
    bool starts = until([&] { return error == ncclSuccess && !simulated_stalls_nccl(device, number); });
    if (starts) {
      auto began = std::chrono::steady_clock::now();
      throttle(tasks);
      run_tasks(*this, tasks);
      while (std::chrono::steady_clock::now() - began < SHORTEST) {
      }
    }
    running_number_ = 0;
  }
  finish(ticket);
}

bool Communicator::drain() {
  std::unique_lock<std::mutex> hold(order_lock_);
  order_.wait(hold, [&] { return executed_ == launched_ || aborted || revoked; });
  return !aborted;
}

void Communicator::abort() {
  aborted = true;
  revoke();
}

void Communicator::revoke() {
  revoked = true;
  if (attached_) wire_->ring(rank);
  {
    std::lock_guard<std::mutex> hold(order_lock_);
    order_.notify_all();
  }
  std::lock_guard<std::mutex> until_it_has_left(executing_);
}

int Communicator::add_operator(const PreMultiply& op) {
  std::lock_guard<std::mutex> hold(operators_lock_);
  operators_[next_operator_] = op;
  return next_operator_++;
}

// The operator is still needed by what was launched with it, so it is kept: it has 32 bytes.
void Communicator::remove_operator(int) {}

bool Communicator::find_operator(int op, PreMultiply* out) {
  std::lock_guard<std::mutex> hold(operators_lock_);
  auto found = operators_.find(op);
  if (found == operators_.end()) return false;
  *out = found->second;
  return true;
}

}  // namespace simulated
