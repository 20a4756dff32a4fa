// The calls that wait for their answers.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace rankcall {

using Clock = std::chrono::steady_clock;

inline std::chrono::milliseconds milliseconds(float seconds) {
  return std::chrono::milliseconds(uint64_t(seconds * 1000));
}

template <class Future, class Peer>
struct CallOf {
  Future future;
  std::shared_ptr<Peer> peer;
  std::chrono::milliseconds timeout;  // 0: none
  Clock::time_point deadline;
};

// The calls in flight. The code that takes a call out completes its future.
template <class Call>
class CallsOf {
 public:
  void add(uint64_t id, Call call) {
    std::lock_guard<std::mutex> guard(mutex_);
    started_++;
    if (call.timeout.count() > 0) {
      deadlines_.emplace(call.deadline, id);
      if (call.deadline < wakes_at_) {
        wakes_at_ = call.deadline;
        earlier_.notify_one();
      }
    }
    calls_.emplace(id, std::move(call));
  }

  std::optional<Call> take(uint64_t id) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = calls_.find(id);
    if (found == calls_.end()) return std::nullopt;
    return remove(found);
  }

  // Waits until calls are overdue and takes them; empty once closed. A call that was answered does
  // not wake the waiting thread, which then wakes up once for nothing: that costs less than a
  // notification in each call.
  std::vector<Call> take_overdue() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!closed_) {
      if (deadlines_.empty()) {
        wakes_at_ = Clock::time_point::max();
        earlier_.wait(lock);
        continue;
      }
      auto first = deadlines_.begin()->first;
      if (Clock::now() < first) {
        wakes_at_ = first;
        earlier_.wait_until(lock, first);
        continue;
      }
      std::vector<Call> overdue;
      while (!deadlines_.empty() && deadlines_.begin()->first <= Clock::now())
        overdue.push_back(remove(calls_.find(deadlines_.begin()->second)));
      return overdue;
    }
    return {};
  }

  // Takes the calls to a peer, or all if it is null.
  std::vector<Call> take_all(const decltype(Call::peer)& peer) {
    std::lock_guard<std::mutex> guard(mutex_);
    std::vector<Call> taken;
    for (auto each = calls_.begin(); each != calls_.end();) {
      auto next = std::next(each);
      if (!peer || each->second.peer == peer) taken.push_back(remove(each));
      each = next;
    }
    return taken;
  }

  void ended() { ended_++; }  // after the callbacks have run: they may have started more
  uint64_t started_count() const { return started_; }
  uint64_t ended_count() const { return ended_; }

  void close() {
    std::lock_guard<std::mutex> guard(mutex_);
    closed_ = true;
    earlier_.notify_all();
  }

 private:
  using Table = std::unordered_map<uint64_t, Call>;

  Call remove(typename Table::iterator found) {
    Call call = std::move(found->second);
    if (call.timeout.count() > 0) deadlines_.erase({call.deadline, found->first});
    calls_.erase(found);
    return call;
  }

  std::mutex mutex_;
  std::condition_variable earlier_;
  Table calls_;
  std::set<std::pair<Clock::time_point, uint64_t>> deadlines_;
  Clock::time_point wakes_at_ = Clock::time_point::max();  // when take_overdue looks again
  std::atomic<uint64_t> started_{0};
  std::atomic<uint64_t> ended_{0};
  bool closed_ = false;
};

}  // namespace rankcall
