// The memory through which the ranks of a communicator talk: a file that all of them map.
//
// Ranks on one machine share it whatever their network namespaces are, as long as they see the same
// folder (SIMULATED_DEVICES_SHM, normally /dev/shm). The file is removed as soon as all ranks have it, so
// that killed ranks leave nothing behind; one that was left by ranks that died earlier is removed when
// the next communicator is made.
//
// Between each two ranks lie two rings of bytes, one for collectives and one for messages. A ring is a
// byte stream, as a connection of NCCL is: a small send ends when its bytes are in the ring, and ranks
// whose sizes disagree wait for bytes that never come or take those of the next operation.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

namespace simulated {

struct alignas(64) Ring {
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
};

// What each rank tells the others.
struct alignas(64) Member {
  std::atomic<uint32_t> bell;      // counts what happened for this rank; a futex
  std::atomic<uint32_t> sleepers;  // threads that sleep on it
  std::atomic<uint32_t> joined;
  int32_t pid, global_rank;  // RANK of its process; faults of links are ordered by it
  // Agreement of host threads (split, grow): rounds that this rank has entered and left, and its values.
  std::atomic<uint64_t> entered, left;
  int64_t values[2];
  char id[128];
};

enum Channel : int { Collectives, Messages, CHANNELS };

class Wire {
 public:
  // Maps the file of that name, which the first rank makes. Returns null and says why if that fails.
  static std::shared_ptr<Wire> open(const std::string& name, int size, int rank, std::string* why);
  ~Wire();

  int size() const { return size_; }
  int joined() const;
  void forget_name();  // removes the file; those who have mapped it keep it

  Member& member(int rank) { return members_[rank]; }
  // Whether the process of that rank is still there. Unlike a pid, its lock is seen from any namespace.
  bool alive(int rank) const;

  // Move up to `bytes` without waiting, and return how many were moved.
  size_t push(Channel channel, int to, const char* data, size_t bytes);
  size_t pull(Channel channel, int from, char* data, size_t bytes);

  void ring(int rank);  // wakes the threads of that rank
  // Sleeps until this rank's bell is no longer `seen`, for 20 ms at the most.
  void sleep(uint32_t seen);
  uint32_t heard() const { return members_[rank_].bell.load(); }

 private:
  Wire() = default;
  Ring& ring_of(Channel channel, int from, int to) { return rings_[(channel * size_ + from) * size_ + to]; }
  char* bytes_of(Channel channel, int from, int to) {
    return data_ + ((channel * size_ + from) * size_ + to) * ring_bytes_;
  }

  int size_ = 0, rank_ = 0, file_ = -1;
  std::string path_;
  size_t mapped_ = 0, ring_bytes_ = 0;
  char* base_ = nullptr;
  Member* members_ = nullptr;
  Ring* rings_ = nullptr;
  char* data_ = nullptr;
};

}  // namespace simulated
