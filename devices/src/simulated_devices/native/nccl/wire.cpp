#include "wire.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

#include "../common/settings.h"

namespace simulated {
namespace {

// Large enough for NCCL's habit that a small send ends without its receive, and small enough that the
// rings of eight ranks fit in the 64 MiB that containers give /dev/shm.
constexpr size_t RING_BYTES = 256 << 10;
constexpr size_t PAGE = 4096;

size_t pages(size_t bytes) { return (bytes + PAGE - 1) & ~(PAGE - 1); }

std::string prefix() { return "simulated-devices-" + std::to_string(getuid()) + "-"; }

// A lock on one byte, which the system takes away when the process ends.
bool lock(int file, int type, off_t at, off_t length, bool wait) {
  struct flock wanted{};
  wanted.l_type = type;
  wanted.l_whence = SEEK_SET;
  wanted.l_start = at;
  wanted.l_len = length;
  return fcntl(file, wait ? F_SETLKW : F_SETLK, &wanted) == 0;
}

// Removes files that no process holds: their ranks were killed before all had joined.
void remove_stale_files() {
  DIR* folder = opendir(settings().shared.c_str());
  if (!folder) return;
  while (dirent* entry = readdir(folder)) {
    if (strncmp(entry->d_name, prefix().c_str(), prefix().size())) continue;
    std::string path = settings().shared + "/" + entry->d_name;
    int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) continue;
    // A rank that is about to join waits for this lock and then sees that its file has lost its name.
    if (lock(file, F_WRLCK, 0, 0, false)) unlink(path.c_str());
    close(file);
  }
  closedir(folder);
}

}  // namespace

std::shared_ptr<Wire> Wire::open(const std::string& name, int size, int rank, std::string* why) {
  static const bool swept = (remove_stale_files(), true);
  (void)swept;
  std::shared_ptr<Wire> wire(new Wire);
  wire->size_ = size;
  wire->rank_ = rank;
  wire->path_ = settings().shared + "/" + prefix() + name;
  size_t members = pages(size * sizeof(Member)), rings = pages(sizeof(Ring) * CHANNELS * size * size);
  // The file is sparse, but its size should stay reasonable for a thousand ranks.
  wire->ring_bytes_ = size <= 64 ? RING_BYTES : RING_BYTES / 8;
  wire->mapped_ = members + rings + wire->ring_bytes_ * CHANNELS * size * size;
  auto failed = [&](const char* what) {
    *why = std::string(what) + " " + wire->path_ + ": " + strerror(errno);
    return nullptr;
  };
  for (;;) {
    wire->file_ = ::open(wire->path_.c_str(), O_CREAT | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (wire->file_ < 0) return failed("cannot open");
    if (!lock(wire->file_, F_WRLCK, rank, 1, true)) return failed("cannot lock");
    struct stat now{};
    if (fstat(wire->file_, &now)) return failed("cannot look at");
    if (now.st_nlink) break;
    close(wire->file_);  // it was taken for a stale one and removed just before it was locked
  }
  if (ftruncate(wire->file_, wire->mapped_)) return failed("cannot resize");
  struct statvfs space{};
  // Writing to a page that the file system has no room for would kill the process.
  if (!fstatvfs(wire->file_, &space) && space.f_bavail * space.f_bsize < (4u << 20)) {
    errno = ENOSPC;
    return failed("cannot use");
  }
  void* base = mmap(nullptr, wire->mapped_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, wire->file_, 0);
  if (base == MAP_FAILED) return failed("cannot map");
  wire->base_ = static_cast<char*>(base);
  wire->members_ = reinterpret_cast<Member*>(wire->base_);
  wire->rings_ = reinterpret_cast<Ring*>(wire->base_ + members);
  wire->data_ = wire->base_ + members + rings;
  Member& own = wire->members_[rank];
  own.pid = getpid();
  own.global_rank = settings().rank;
  own.joined = 1;
  for (int other = 0; other < size; ++other) wire->ring(other);
  return wire;
}

Wire::~Wire() {
  if (base_) munmap(base_, mapped_);
  if (file_ >= 0) close(file_);
}

int Wire::joined() const {
  int count = 0;
  for (int rank = 0; rank < size_; ++rank) count += members_[rank].joined.load();
  return count;
}

void Wire::forget_name() { unlink(path_.c_str()); }

bool Wire::alive(int rank) const {
  if (members_[rank].pid == getpid()) return true;  // a process sees no locks of its own
  struct flock held{};
  held.l_type = F_WRLCK;
  held.l_whence = SEEK_SET;
  held.l_start = rank;
  held.l_len = 1;
  return fcntl(file_, F_GETLK, &held) != 0 || held.l_type != F_UNLCK;
}

size_t Wire::push(Channel channel, int to, const char* data, size_t bytes) {
  Ring& ring = ring_of(channel, rank_, to);
  uint64_t written = ring.written.load(std::memory_order_relaxed);
  size_t room = ring_bytes_ - (written - ring.read.load(std::memory_order_acquire));
  bytes = std::min(bytes, room);
  if (!bytes) return 0;
  char* memory = bytes_of(channel, rank_, to);
  size_t at = written % ring_bytes_, first = std::min(bytes, ring_bytes_ - at);
  memcpy(memory + at, data, first);
  memcpy(memory, data + first, bytes - first);
  ring.written.store(written + bytes, std::memory_order_seq_cst);
  this->ring(to);
  return bytes;
}

size_t Wire::pull(Channel channel, int from, char* data, size_t bytes) {
  Ring& ring = ring_of(channel, from, rank_);
  uint64_t read = ring.read.load(std::memory_order_relaxed);
  bytes = std::min<size_t>(bytes, ring.written.load(std::memory_order_acquire) - read);
  if (!bytes) return 0;
  const char* memory = bytes_of(channel, from, rank_);
  size_t at = read % ring_bytes_, first = std::min(bytes, ring_bytes_ - at);
  memcpy(data, memory + at, first);
  memcpy(data + first, memory, bytes - first);
  ring.read.store(read + bytes, std::memory_order_seq_cst);
  this->ring(from);
  return bytes;
}

void Wire::ring(int rank) {
  Member& member = members_[rank];
  member.bell++;
  if (member.sleepers.load()) syscall(SYS_futex, &member.bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Wire::sleep(uint32_t seen) {
  Member& own = members_[rank_];
  own.sleepers++;
  timespec most{0, 20'000'000};
  syscall(SYS_futex, &own.bell, FUTEX_WAIT, seen, &most, nullptr, 0);
  own.sleepers--;
}

}  // namespace simulated
