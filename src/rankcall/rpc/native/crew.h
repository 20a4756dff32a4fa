// The threads that receive and handle messages.
//
// They take turns: one receives; with a message in hand it wakes another to receive next, and
// handles the message itself, so that no message changes threads on its way. At most `limit`
// threads run requests, and there is always one more to receive: a request that waits for calls of
// its own cannot keep their answers from being read.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace rankcall {

// Each thread keeps a `Scope` for as long as it runs.
template <class Scope>
class Crew {
 public:
  using Task = std::function<void()>;

  // `receive` blocks; it calls request() or answer(), and returns false once there will be no more.
  // `tidy` is called after each task, on its thread.
  void start(std::size_t limit, std::function<bool()> receive, std::function<void()> tidy) {
    std::lock_guard<std::mutex> guard(mutex_);
    limit_ = limit;
    receive_ = std::move(receive);
    tidy_ = std::move(tidy);
    for (std::size_t i = 0; i <= limit; i++) add_thread();
  }

  // Have a thread run what somebody asks of this worker. Called by `receive`.
  void request(Task task) {
    std::lock_guard<std::mutex> guard(mutex_);
    requests_.push_back(std::move(task));
  }

  // Have a thread run what ends a call of this worker's own; never waits for requests.
  void answer(Task task) {
    std::lock_guard<std::mutex> guard(mutex_);
    answers_.push_back(std::move(task));
    waiting_.notify_one();
  }

  std::size_t threads() {
    std::lock_guard<std::mutex> guard(mutex_);
    return alive_;
  }

  std::size_t idle() {
    std::lock_guard<std::mutex> guard(mutex_);
    return alive_ - running_;
  }

  // Stop, and wait for the threads. False: some are still in a request after `patience`; they are
  // left to themselves and must find everything they use alive.
  bool stop(std::chrono::milliseconds patience) {
    std::unique_lock<std::mutex> lock(mutex_);
    stopping_ = true;
    waiting_.notify_all();
    bool ended = left_.wait_for(lock, patience, [&] { return alive_ == 0; });
    auto threads = std::move(threads_);
    lock.unlock();
    for (auto& each : threads) ended ? each.join() : each.detach();
    return ended;
  }

 private:
  void add_thread() {
    alive_++;
    threads_.emplace_back([this] {
      pthread_setname_np(pthread_self(), "rankcall-rpc");
      work();
    });
  }

  void work() {
    Scope scope;
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopping_) {
      if (!answers_.empty()) {
        run(answers_, lock);
      } else if (!requests_.empty() && running_ < limit_) {
        run(requests_, lock);
      } else if (!receiving_) {
        receive(lock);
      } else {
        waiting_.wait(lock);
      }
    }
    alive_--;
    left_.notify_all();
  }

  void run(std::deque<Task>& tasks, std::unique_lock<std::mutex>& lock) {
    Task task = std::move(tasks.front());
    tasks.pop_front();
    running_++;
    // An answer's callbacks may wait for another answer: somebody must be there to receive it.
    if (running_ == alive_ && alive_ < 4 * (limit_ + 1)) add_thread();
    if (!receiving_) waiting_.notify_one();
    lock.unlock();
    task();
    task = nullptr;
    tidy_();
    lock.lock();
    running_--;
  }

  void receive(std::unique_lock<std::mutex>& lock) {
    receiving_ = true;
    lock.unlock();
    bool more = receive_();
    lock.lock();
    receiving_ = false;
    if (!more) {
      stopping_ = true;
      waiting_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable waiting_;
  std::condition_variable left_;
  std::function<bool()> receive_;
  std::function<void()> tidy_;
  std::deque<Task> requests_;
  std::deque<Task> answers_;
  std::vector<std::thread> threads_;
  std::size_t limit_ = 0;
  std::size_t running_ = 0;
  std::size_t alive_ = 0;
  bool receiving_ = false;
  bool stopping_ = false;
};

}  // namespace rankcall
