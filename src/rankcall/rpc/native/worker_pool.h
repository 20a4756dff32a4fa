// The threads that receive and handle messages.
//
// One thread at a time receives. When it has a message it wakes another thread to receive next, and
// handles the message itself, so that no message changes threads. At most `limit` threads run
// requests, and there is always one more to receive: a request that waits for calls of its own
// does not keep their answers from being read.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace rankcall {

// Each thread has a `Scope` for as long as it runs.
template <class Scope>
class WorkerPool {
 public:
  using Task = std::function<void()>;

  // `receive` blocks; it calls add_request() or add_answer(), and returns false at the end.
  // `clean_up` is called after each task, on its thread; `on_failure` is told what a task has
  // thrown. Each thread shares `owner`, which must keep this pool and everything that tasks use
  // alive.
  void start(std::size_t limit, const std::shared_ptr<void>& owner, std::function<bool()> receive,
             std::function<void()> clean_up, std::function<void(const char*)> on_failure) {
    std::lock_guard<std::mutex> guard(mutex_);
    limit_ = limit;
    receive_ = std::move(receive);
    clean_up_ = std::move(clean_up);
    on_failure_ = std::move(on_failure);
    for (std::size_t i = 0; i <= limit; i++) add_thread(owner);
  }

  // Has a thread run a request of another worker. Only `receive` calls this.
  void add_request(Task task) {
    std::lock_guard<std::mutex> guard(mutex_);
    requests_.push_back(std::move(task));
  }

  // Has a thread run a task that never waits for requests, such as one that completes a call.
  // If `receive` calls this, its own thread runs the task next, so no other is woken.
  void add_answer(Task task) {
    std::lock_guard<std::mutex> guard(mutex_);
    answers_.push_back(std::move(task));
    if (receiver_ != std::this_thread::get_id()) waiting_.notify_one();
  }

  std::size_t threads() {
    std::lock_guard<std::mutex> guard(mutex_);
    return alive_;
  }

  std::size_t idle() {
    std::lock_guard<std::mutex> guard(mutex_);
    return alive_ - running_;
  }

  // Stops, and waits up to `patience` for the threads. Those that are still in a task then are left
  // behind. Returns whether no thread receives any more.
  bool stop(std::chrono::milliseconds patience) {
    std::unique_lock<std::mutex> lock(mutex_);
    stopping_ = true;
    waiting_.notify_all();
    bool ended = left_.wait_for(lock, patience, [&] { return alive_ == 0; });
    bool receiving = receiver_ != std::thread::id();
    auto threads = std::move(threads_);
    auto requests = std::move(requests_), answers = std::move(answers_);
    lock.unlock();
    for (auto& thread : threads) ended ? thread.join() : thread.detach();
    return !receiving;
  }

 private:
  void add_thread(const std::shared_ptr<void>& owner) {
    threads_.emplace_back([this, owner] {
      pthread_setname_np(pthread_self(), "rankcall-rpc");
      work(owner);
    });
    alive_++;
  }

  // The system may refuse another thread. Those that are there go on.
  void try_to_add_thread(const std::shared_ptr<void>& owner) {
    try {
      add_thread(owner);
    } catch (const std::system_error&) {
    }
  }

  void work(const std::shared_ptr<void>& owner) {
    Scope scope;
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopping_) {
      if (!answers_.empty()) {
        run(answers_, lock, owner);
      } else if (!requests_.empty() && running_ < limit_) {
        run(requests_, lock, owner);
      } else if (receiver_ == std::thread::id()) {
        receive(lock);
      } else {
        waiting_.wait(lock);
      }
    }
    alive_--;
    left_.notify_all();
  }

  void run(std::deque<Task>& tasks, std::unique_lock<std::mutex>& lock,
           const std::shared_ptr<void>& owner) {
    Task task = std::move(tasks.front());
    tasks.pop_front();
    running_++;
    // A callback of an answer may wait for another answer: some thread must be there to receive it.
    // The bound stops callbacks that wait for one another from taking ever more threads.
    if (running_ == alive_ && alive_ < 4 * (limit_ + 1)) try_to_add_thread(owner);
    bool has_receiver = receiver_ != std::thread::id();
    lock.unlock();
    if (!has_receiver) waiting_.notify_one();
    try {
      task();
    } catch (const std::exception& error) {  // the process must not end for it
      on_failure_(error.what());
    }
    task = nullptr;
    clean_up_();
    lock.lock();
    running_--;
  }

  void receive(std::unique_lock<std::mutex>& lock) {
    receiver_ = std::this_thread::get_id();
    lock.unlock();
    bool more = receive_();
    lock.lock();
    receiver_ = std::thread::id();
    if (!more) {
      stopping_ = true;
      waiting_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable waiting_;
  std::condition_variable left_;
  std::function<bool()> receive_;
  std::function<void()> clean_up_;
  std::function<void(const char*)> on_failure_;
  std::deque<Task> requests_;
  std::deque<Task> answers_;
  std::vector<std::thread> threads_;
  std::size_t limit_ = 0;
  std::size_t running_ = 0;
  std::size_t alive_ = 0;
  std::thread::id receiver_;  // of no thread while none receives
  bool stopping_ = false;
};

}  // namespace rankcall
