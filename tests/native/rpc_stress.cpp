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

#include <sys/wait.h>

#include "block_copy.h"
#include "calls.h"
#include "check.h"
#include "process_state.h"
#include "shared_memory.h"
#include "wire.h"
#include "worker_pool.h"

using namespace rankcall;

// A queue between threads, in place of the agent's socket.
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
void the_pool_answers_while_requests_wait() {
  struct Item {
    int number;
    std::shared_ptr<std::promise<int>> answer;
    bool is_answer;
  };
  Pipe<Item> pipe;
  std::atomic<int> cleaned_up{0}, failures{0};
  WorkerPool<NoScope> pool;
  auto ask = [&](int number) {
    auto answer = std::make_shared<std::promise<int>>();
    pipe.send({number, answer, false});
    return answer->get_future();
  };
  auto receive = [&] {
    Item item;
    if (!pipe.receive(item)) return false;
    if (item.is_answer)
      pool.add_answer([item] { item.answer->set_value(item.number); });
    else
      pool.add_request([&, item] { pipe.send({item.number, item.answer, true}); });
    return true;
  };
  pool.start(3, nullptr, receive, [&] { cleaned_up++; }, [&](const char*) { failures++; });
  pool.add_answer([] { throw std::runtime_error("a task that fails"); });
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 6; caller++) {
    callers.emplace_back([&] {
      for (int i = 0; i < 200; i++) {
        auto answer = ask(i);
        CHECK(answer.get() == i);
      }
    });
  }
  // Requests that themselves wait for an answer, on the pool's threads.
  std::vector<std::future<int>> outer;
  for (int i = 0; i < 40; i++) {
    auto done = std::make_shared<std::promise<int>>();
    outer.push_back(done->get_future());
    pool.add_request([&, done, i] {
      auto inner = std::make_shared<std::promise<int>>();
      auto answer = inner->get_future();
      pipe.send({i, inner, true});
      done->set_value(answer.get());
    });
  }
  for (auto& each : callers) each.join();
  for (int i = 0; i < 40; i++) CHECK(outer[i].get() == i);
  pipe.close();
  CHECK(pool.stop(std::chrono::seconds(20)));
  CHECK(cleaned_up.load() == 6 * 200 * 2 + 40 * 2 + 1);
  CHECK(failures.load() == 1);
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

// The thread that waits for deadlines waits for a later one, or for none at all, when an earlier one comes.
void an_earlier_deadline_is_seen() {
  using Call = CallOf<std::shared_ptr<Ended>, int>;
  for (bool has_later : {false, true}) {
    CallsOf<Call> calls;
    auto after = [&](std::chrono::milliseconds timeout) {
      return Call{std::make_shared<Ended>(), nullptr, timeout, Clock::now() + timeout};
    };
    if (has_later) calls.add(1, after(std::chrono::hours(1)));
    std::promise<std::size_t> taken;
    std::thread watcher([&] { taken.set_value(calls.take_overdue().size()); });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // most likely, it waits by now
    for (uint64_t id = 2; id < 100; id++) {
      calls.add(id, after(std::chrono::minutes(30)));
      CHECK(calls.take(id));
    }
    calls.add(100, after(std::chrono::milliseconds(20)));
    auto answer = taken.get_future();
    bool in_time = answer.wait_for(std::chrono::minutes(2)) == std::future_status::ready;
    calls.close();
    watcher.join();
    CHECK(in_time && answer.get() == 1);
  }
}

// A block is written for one reader, and not again before that reader has freed it. Readers are lost
// in the middle: their blocks stay as they are, and freeing them later has no effect on others.
void blocks_are_not_shared(const std::string& folder) {
  struct Sent {
    uint64_t slab;
    uint32_t block;
    uint64_t generation;
    std::size_t bytes;
    unsigned char mark;
    uint64_t session;
  };
  OwnSlabs own;
  OthersSlabs others;
  own.open(folder + "/", 4 << 20);
  constexpr int kReaders = 4, kMessages = 400;
  std::atomic<int> read{0};
  std::vector<std::thread> threads;
  for (int reader = 0; reader < kReaders; reader++) {
    auto pipe = std::make_shared<Pipe<Sent>>();
    threads.emplace_back([&, reader, pipe] {
      std::mt19937 random(reader);
      for (int i = 0; i < kMessages; i++) {
        std::size_t bytes = 64 * 1024 + random() % 200000;
        auto session = uint64_t(reader) + 100 * (i / 150);  // a new life now and then
        if (i % 150 == 0 && i > 0) own.close(session - 100);
        auto block = own.take(bytes, session);
        while (!block) {  // until a reader has freed one
          std::this_thread::yield();
          block = own.take(bytes, session);
        }
        auto mark = (unsigned char)(random());
        std::memset(block.data(), mark, bytes);
        Sent sent{block.slab_id(), block.block(), block.generation(), bytes, mark, session};
        if (random() % 10 == 0) continue;  // not sent after all: freed here
        block.hand_on();
        pipe->send(sent);
      }
      pipe->close();
    });
    threads.emplace_back([&, reader, pipe] {
      std::mt19937 random(reader);
      std::deque<std::pair<BlockInUse, Sent>> kept;
      auto check_one = [&] {
        const char* data = kept.front().first.data();
        const Sent& sent = kept.front().second;
        for (std::size_t at = 0; at < sent.bytes; at += 4093)
          CHECK((unsigned char)data[at] == sent.mark);
        kept.pop_front();
      };
      for (Sent sent; pipe->receive(sent); read++) {
        auto slab = others.get(folder + "/", sent.slab);
        if (!slab) continue;  // its sender has given this reader up
        CHECK(slab->holds(sent.block, sent.generation, sent.bytes));
        kept.emplace_back(BlockInUse(slab, sent.slab, sent.block, sent.generation), sent);
        slab->release(sent.block, sent.generation - 1);  // a former reader's: no effect
        if (random() % 8 == 0) {  // back to its sender, whose own mapping shows the same bytes
          auto theirs = own.find(sent.slab, sent.session);
          CHECK(!own.find(sent.slab, sent.session + 1));
          if (theirs) {
            kept.back().first.hand_on();
            kept.back().first = BlockInUse(theirs, sent.slab, sent.block, sent.generation);
          }
        }
        while (kept.size() > random() % 4) check_one();
      }
      while (!kept.empty()) check_one();
    });
  }
  for (auto& each : threads) each.join();
  CHECK(read > kReaders * kMessages / 2);
  CHECK(own.total() <= 4 << 20);
  for (int reader = 0; reader < kReaders; reader++) own.close(reader + 200);
  CHECK(own.total() == 0);
}

// Both ways copy the bytes and no others, whatever the addresses and the size.
void copies_are_whole() {
  std::mt19937 random(5);
  std::vector<char> from(3000), to(3000);
  for (char& each : from) each = char(random());
  for (int i = 0; i < 20000; i++) {
    std::size_t bytes = random() % 2000, source = random() % 1000, at = 16 + random() % 900;
    std::fill(to.begin(), to.end(), char(i));
    BlockCopy copy;
    if (i % 2) copy.judge(1000, std::chrono::seconds(1));
    copy(to.data() + at, from.data() + source, bytes);
    CHECK(std::equal(to.begin() + long(at), to.begin() + long(at + bytes), from.data() + source));
    auto is_old = [&](char each) { return each == char(i); };
    CHECK(std::all_of(to.begin(), to.begin() + long(at), is_old));
    CHECK(std::all_of(to.begin() + long(at + bytes), to.end(), is_old));
  }
}

// A slow copy makes the next 63 stream, and then one shows whether it is still slow.
void slow_copies_stream() {
  char from[64] = {}, to[64];
  BlockCopy copy;
  copy.judge(1 << 20, std::chrono::microseconds(209));
  CHECK(!copy.streams());
  copy.judge(1 << 20, std::chrono::microseconds(210));
  for (int i = 0; i < 63; i++) {
    CHECK(copy.streams());
    copy(to, from, sizeof to);
  }
  CHECK(!copy.streams());
}

void read_all(const char* data, std::size_t size) {
  volatile char last = 0;
  for (std::size_t i = 0; i < size; i++) last = data[i];
  (void)last;
}

void read_all(const Incoming& incoming) {
  const Parsed& parsed = incoming.parsed;
  read_all(parsed.payload, parsed.header.payload_bytes);
  read_all(parsed.pickle, parsed.header.pickle_bytes);
  for (std::size_t slot = 0; slot < parsed.slots.size(); slot++)
    if (parsed.packed[slot]) read_all(parsed.packed[slot], parsed.slots[slot].bytes);
  for (const Bytes& part : incoming.parts) read_all(part.data, part.size);
}

// The decoder stays within the frames, and refuses or understands them. Frames are exactly as large
// as they are, so that the sanitizer sees one byte further.
void the_decoder_stays_within_bounds() {
  std::mt19937_64 random(7);
  Assembler assembler(1 << 16);
  int whole = 0;
  for (int round = 0; round < 40000; round++) {
    Header header{kMagic, uint8_t(1 + random() % 6), {}, 1, 2, 3, 4, random() % 40, random() % 40,
                  0, uint32_t(random() % 4), uint32_t(random() % 4), 0};
    std::size_t size = sizeof header + random() % 200;
    std::shared_ptr<char[]> frame(new char[size]);
    for (std::size_t i = 0; i < size; i++) frame[i] = char(random() % 3);
    std::memcpy(frame.get(), &header, sizeof header);
    for (unsigned flips = random() % 4; flips > 0; flips--) frame[random() % size] = char(random());
    std::size_t given = size - (random() % 8 == 0 ? random() % size : 0);
    try {
      if (random() % 2) {
        Chunk chunk{kChunkMagic, uint32_t(random() % 8 / 7), random() % 3, random() % 2,
                    random() % 8 / 7, random() % 4 ? given : random() % 300};
        auto message = assembler.add(chunk, frame.get(), given, random() % 4 != 0);
        if (message) read_all(*message), whole++;
        continue;
      }
      std::vector<Bytes> parts(random() % 3, Bytes{frame.get(), random() % 40, frame});
      read_all(parse_message({frame.get(), given, frame}, std::move(parts))), whole++;
    } catch (const WireError&) {
    }
  }
  CHECK(whole > 0);
}

// The process of an open stat file has ended when the file is read. (The agent once ended here.)
void a_process_may_end_at_any_time() {
  CHECK(!has_ended(getpid()));
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  const int stat = open(("/proc/" + std::to_string(child) + "/stat").c_str(), O_RDONLY);
  CHECK(stat >= 0);
  kill(child, SIGKILL);
  siginfo_t info;
  CHECK(waitid(P_PID, id_t(child), &info, WEXITED | WNOWAIT) == 0);
  CHECK(has_ended(child));  // a zombie
  CHECK(waitpid(child, nullptr, 0) == child);
  CHECK(state_letter(stat) == 0);
  CHECK(has_ended(child));
  close(stat);
}

int main(int, char** arguments) {
  a_process_may_end_at_any_time();
  the_pool_answers_while_requests_wait();
  calls_end_once();
  an_earlier_deadline_is_seen();
  blocks_are_not_shared(arguments[1]);
  copies_are_whole();
  slow_copies_stream();
  the_decoder_stays_within_bounds();
  std::puts("ok");
}
