// Many threads issue and finish records in a ring far too small for them. Run under ThreadSanitizer.
//
// Each thread keeps a few records open, finishes them out of order, and some on another thread. At
// the end every index was finished once, nothing is left open, and every slot holds a whole record
// of the newest lap it could. Prints "ok" and what was seen.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "ring.h"

using namespace rankcall;

namespace {

constexpr uint64_t kCapacity = 64, kInflight = 32;
constexpr uint64_t kTables = 4096 + kInflight * sizeof(Record), kRecords = kTables + 65536;
constexpr int kThreads = 6, kRounds = 30000;

std::atomic<uint64_t> g_unwritten{0};

void fail(const char* what, uint64_t index) {
  std::printf("FAILED: %s at %llu\n", what, static_cast<unsigned long long>(index));
  std::exit(1);
}

uint64_t issue(Ring& ring) {
  uint64_t index;
  if (!ring.reserve(index)) fail("closed", index);
  if (Record* slot = ring.begin(index)) {
    slot->seq = slot->correlation = index;
    slot->completed_ns = 0;
    slot->status = layout::kStarted;
    ring.publish(slot, index);
  } else {
    g_unwritten++;
  }
  return index;
}

void finish(Ring& ring, uint64_t index) {
  ring.finish(index, Outcome{layout::kCompleted, static_cast<int64_t>(index) + 1});
}

// Records handed from one thread to another to be finished there, as a back end's threads do.
struct Mailbox {
  std::mutex mutex;
  std::vector<uint64_t> waiting;
} g_mail;

void work(Ring& ring, int seed) {
  std::mt19937 random(seed);
  std::vector<uint64_t> open;
  for (int round = 0; round < kRounds; round++) {
    open.push_back(issue(ring));
    if (random() % 8 == 0) ring.start(open.back(), 1);
    if (random() % 16 == 0) ring.append(layout::kEntryString, "text");
    if (random() % 4 == 0) {
      std::lock_guard<std::mutex> lock(g_mail.mutex);
      g_mail.waiting.push_back(open.back());
      open.pop_back();
      if (random() % 2) std::swap(g_mail.waiting, open);
    }
    while (open.size() > random() % 4) {
      std::swap(open[random() % open.size()], open.back());
      finish(ring, open.back());
      open.pop_back();
    }
  }
  for (const uint64_t index : open) finish(ring, index);
}

}  // namespace

int main() {
  std::vector<char> memory(kRecords + kCapacity * sizeof(Record) + 64, 0);
  char* base = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  auto ring = std::make_unique<Ring>(base, Geometry{kCapacity, kInflight, 65536, 4096, kTables, kRecords});
  std::vector<std::thread> threads;
  for (int seed = 0; seed < kThreads; seed++) threads.emplace_back(work, std::ref(*ring), seed);
  for (auto& thread : threads) thread.join();
  for (const uint64_t index : g_mail.waiting) finish(*ring, index);
  ring->close();
  uint64_t index;
  if (ring->reserve(index)) fail("reserved after close", index);
  if (!ring->drained()) fail("not drained", ring->done());
  const uint64_t head = ring->done();
  if (head != static_cast<uint64_t>(kThreads) * kRounds) fail("head", head);
  const auto* slots = reinterpret_cast<const Record*>(base + kRecords);
  const auto* parked = reinterpret_cast<const Record*>(base + 4096);
  const uint64_t lost = ring->field<uint64_t>(layout::kInflightLost).load();
  uint64_t open = 0;
  for (uint64_t i = 0; i < kCapacity + kInflight; i++) {
    const Record& record = i < kCapacity ? slots[i] : parked[i - kCapacity];
    const uint64_t word = record.commit.load();
    if (!word) continue;
    const uint64_t number = (word >> 2) - 1;
    if (i < kCapacity && (number & (kCapacity - 1)) != i) fail("slot of another record", number);
    if ((word & 3) != layout::kDone) open++;
    else if (record.completed_ns != static_cast<int64_t>(number) + 1) fail("another's end", number);
    if (record.seq != number || record.correlation != number) fail("another's body", number);
  }
  if (open) fail("left open", open);
  std::printf("ok: %llu records, %llu not written for a thread a lap behind, %llu lost with the table full\n",
              static_cast<unsigned long long>(head), static_cast<unsigned long long>(g_unwritten.load()),
              static_cast<unsigned long long>(lost));
}
