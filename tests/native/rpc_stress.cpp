// The agent's parts that threads share, under many threads, for a sanitizer to watch.
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "arena.h"
#include "calls.h"
#include "crew.h"
#include "wire.h"

using namespace rankcall;

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "line %d: not %s\n", __LINE__, #condition);     \
      std::abort();                                                        \
    }                                                                      \
  } while (0)

// A queue between threads: what a socket is to the agent.
template <class T>
class Pipe {
 public:
  void send(T item) {
    std::lock_guard<std::mutex> guard(mutex_);
    items_.push_back(std::move(item));
    more_.notify_one();
  }

  bool receive(T& item) {
    std::unique_lock<std::mutex> lock(mutex_);
    more_.wait(lock, [&] { return closed_ || !items_.empty(); });
    if (items_.empty()) return false;
    item = std::move(items_.front());
    items_.pop_front();
    return true;
  }

  void close() {
    std::lock_guard<std::mutex> guard(mutex_);
    closed_ = true;
    more_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable more_;
  std::deque<T> items_;
  bool closed_ = false;
};

struct NoScope {
  NoScope() {}
  ~NoScope() {}
};

// Requests that wait for calls of their own, more at once than there are threads for requests.
void crew_answers_while_requests_wait() {
  struct Item {
    int number;
    std::shared_ptr<std::promise<int>> answer;
    bool is_answer;
  };
  Pipe<Item> pipe;
  std::atomic<int> tidied{0};
  Crew<NoScope> crew;
  auto ask = [&](int number) {
    auto answer = std::make_shared<std::promise<int>>();
    pipe.send({number, answer, false});
    return answer->get_future();
  };
  auto receive = [&] {
    Item item;
    if (!pipe.receive(item)) return false;
    if (item.is_answer)
      crew.answer([item] { item.answer->set_value(item.number); });
    else
      crew.request([&, item] { pipe.send({item.number, item.answer, true}); });
    return true;
  };
  crew.start(3, receive, [&] { tidied++; });
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 6; caller++) {
    callers.emplace_back([&] {
      for (int i = 0; i < 200; i++) {
        auto answer = ask(i);
        CHECK(answer.get() == i);
      }
    });
  }
  // Requests that themselves wait for an answer, on the crew's threads.
  std::vector<std::future<int>> outer;
  for (int i = 0; i < 40; i++) {
    auto done = std::make_shared<std::promise<int>>();
    outer.push_back(done->get_future());
    crew.request([&, done, i] {
      auto inner = std::make_shared<std::promise<int>>();
      auto answer = inner->get_future();
      pipe.send({i, inner, true});
      done->set_value(answer.get());
    });
  }
  for (auto& each : callers) each.join();
  for (int i = 0; i < 40; i++) CHECK(outer[i].get() == i);
  pipe.close();
  CHECK(crew.stop(std::chrono::seconds(20)));
  CHECK(tidied.load() == 6 * 200 * 2 + 40 * 2);
}

struct Ended {
  std::atomic<int> times{0};
};

// Each call ends once, whether an answer, its deadline or the loss of its peer comes first.
void calls_end_once() {
  using Call = CallOf<std::shared_ptr<Ended>, int>;
  CallsOf<Call> calls;
  auto peers = std::vector<std::shared_ptr<int>>{std::make_shared<int>(0), std::make_shared<int>(1)};
  constexpr int kThreads = 4, kCalls = 1000;
  std::vector<std::vector<std::shared_ptr<Ended>>> all(kThreads);
  std::thread watcher([&] {
    for (auto overdue = calls.take_overdue(); !overdue.empty(); overdue = calls.take_overdue()) {
      for (auto& call : overdue) call.future->times++, calls.ended();
    }
  });
  std::atomic<bool> losing{true};
  std::thread loser([&] {
    while (losing) {
      for (auto& call : calls.take_all(peers[1])) call.future->times++, calls.ended();
      std::this_thread::yield();
    }
  });
  std::vector<std::thread> callers;
  for (int thread = 0; thread < kThreads; thread++) {
    callers.emplace_back([&, thread] {
      for (int i = 0; i < kCalls; i++) {
        auto id = uint64_t(thread) * kCalls + i;
        auto timeout = std::chrono::milliseconds(i % 3);  // 0: none
        auto future = std::make_shared<Ended>();
        all[thread].push_back(future);
        calls.add(id, {future, peers[i % 2], timeout, Clock::now() + timeout});
        if (i % 5 == 0) continue;  // no answer comes
        if (auto call = calls.take(id)) call->future->times++, calls.ended();
      }
    });
  }
  for (auto& each : callers) each.join();
  losing = false;
  loser.join();
  for (auto& call : calls.take_all(nullptr)) call.future->times++, calls.ended();
  calls.close();
  watcher.join();
  for (auto& each : all)
    for (auto& ended : each) CHECK(ended->times == 1);
  CHECK(calls.started_count() == calls.ended_count());
  CHECK(calls.started_count() == uint64_t(kThreads) * kCalls);
}

// A block is written by one sender at a time, and not before its reader has let go of it.
void blocks_are_not_shared(const std::string& folder) {
  struct Sent {
    uint64_t id;
    std::size_t bytes;
    unsigned char mark;
  };
  Arena arena;
  arena.open(folder + "/", 1 << 20);  // too little for all: blocks make room for others
  Attachments attachments;
  Pipe<Sent> pipe;
  std::atomic<int> read{0};
  std::vector<std::thread> senders, readers;
  for (int reader = 0; reader < 3; reader++) {
    readers.emplace_back([&] {
      Sent sent;
      while (pipe.receive(sent)) {
        auto block = attachments.get(folder + "/", sent.id);
        CHECK(block);
        auto* data = reinterpret_cast<unsigned char*>(block->data());
        for (std::size_t i = 0; i < sent.bytes; i += 509) CHECK(data[i] == sent.mark);
        CHECK(data[sent.bytes - 1] == sent.mark);
        read++;
        block->free();
      }
    });
  }
  constexpr int kSenders = 3, kMessages = 60;
  for (int sender = 0; sender < kSenders; sender++) {
    senders.emplace_back([&, sender] {
      std::mt19937 random(sender);
      for (int i = 0; i < kMessages; i++) {
        std::size_t bytes = 65536 + random() % 200000;
        auto taken = arena.take(bytes, sender);
        while (!taken.block) {  // until a reader has let go of one
          std::this_thread::yield();
          taken = arena.take(bytes, sender);
        }
        CHECK(taken.block->capacity() >= bytes);
        std::memset(taken.block->data(), sender * 80 + i % 80, bytes);
        pipe.send({taken.id, bytes, (unsigned char)(sender * 80 + i % 80)});
      }
    });
  }
  for (auto& each : senders) each.join();
  pipe.close();
  for (auto& each : readers) each.join();
  CHECK(read == kSenders * kMessages);
  CHECK(arena.total() <= 1 << 20);
}

// Whatever comes, the parser stays within the frame and refuses or understands it.
void the_parser_stays_within_bounds() {
  std::mt19937_64 random(7);
  for (int round = 0; round < 20000; round++) {
    Header header{kMagic, uint8_t(1 + random() % 5), {}, 1, 2, 3, 4, random() % 40, random() % 40,
                  0, 0, uint32_t(random() % 4), uint32_t(random() % 4)};
    // Exactly as large as it is: one byte further is the sanitizer's.
    std::size_t size = sizeof header + random() % 200;
    std::unique_ptr<char[]> frame(new char[size]);
    for (std::size_t i = 0; i < size; i++) frame[i] = char(random() % 3);
    std::memcpy(frame.get(), &header, sizeof header);
    for (unsigned flips = random() % 4; flips > 0; flips--) frame[random() % size] = char(random());
    std::vector<std::size_t> frames(random() % 3, random() % 40);
    try {
      Parsed parsed = parse(frame.get(), size - (random() % 8 == 0 ? random() % size : 0), frames);
      volatile char last = 0;
      for (uint64_t i = 0; i < parsed.header.payload_bytes; i++) last = parsed.payload[i];
      for (uint64_t i = 0; i < parsed.header.pickle_bytes; i++) last = parsed.pickle[i];
      for (std::size_t slot = 0; slot < parsed.slots.size(); slot++) {
        for (uint64_t i = 0; parsed.packed[slot] && i < parsed.slots[slot].bytes; i++)
          last = parsed.packed[slot][i];
      }
      (void)last;
    } catch (const WireError&) {
    }
  }
}

int main(int, char** arguments) {
  crew_answers_while_requests_wait();
  calls_end_once();
  blocks_are_not_shared(arguments[1]);
  the_parser_stays_within_bounds();
  std::puts("ok");
}
