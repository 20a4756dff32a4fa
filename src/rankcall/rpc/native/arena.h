// Shared memory for large buffers between workers of one host: written once, read in place.
//
// A block is a file on a tmpfs, made and removed by the sender and kept for reuse: mapping fresh
// memory costs more than the copy. The receiver's tensor lies in the block; when it is freed, the
// receiver marks the block free, without a message.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace rankcall {

constexpr std::size_t kBlockHeader = 4096;  // keeps the data page-aligned

enum class BlockState : uint32_t { kFree = 0, kBusy = 1, kGone = 2 };

// A mapped block file.
class Block {
 public:
  Block(void* base, std::size_t capacity) : base_(static_cast<char*>(base)), capacity_(capacity) {}
  ~Block() { munmap(base_, kBlockHeader + capacity_); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  char* data() const { return base_ + kBlockHeader; }
  std::size_t capacity() const { return capacity_; }
  std::atomic<uint32_t>& state() const { return *reinterpret_cast<std::atomic<uint32_t>*>(base_); }
  void free() const { state().store(uint32_t(BlockState::kFree), std::memory_order_release); }

  // Null where the file is not a block of ours, or cannot be mapped.
  static std::shared_ptr<Block> open(const std::string& path) {
    int fd = ::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return nullptr;
    struct stat about;
    bool ours = fstat(fd, &about) == 0 && S_ISREG(about.st_mode) && about.st_uid == geteuid() &&
                std::size_t(about.st_size) > kBlockHeader;
    auto block = ours ? map(fd, about.st_size) : nullptr;
    ::close(fd);
    return block;
  }

  // Null where there is no room: pages are reserved, as a page that is not there is a SIGBUS later.
  static std::shared_ptr<Block> create(const std::string& path, std::size_t capacity) {
    int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) return nullptr;
    std::size_t size = kBlockHeader + capacity;
    auto block = posix_fallocate(fd, 0, off_t(size)) == 0 ? map(fd, size) : nullptr;
    ::close(fd);
    if (!block) unlink(path.c_str());
    return block;
  }

 private:
  static std::shared_ptr<Block> map(int fd, std::size_t size) {
    void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (base == MAP_FAILED) return nullptr;
    return std::make_shared<Block>(base, size - kBlockHeader);
  }

  char* base_;
  std::size_t capacity_;
};

// The blocks this worker sends in.
class Arena {
 public:
  struct Taken {
    uint64_t id;
    std::shared_ptr<Block> block;  // null: there is no room, send the bytes themselves
  };

  void open(std::string prefix, std::size_t limit) {
    prefix_ = std::move(prefix);
    limit_ = limit;
  }

  ~Arena() {
    for (auto& each : blocks_) remove(each);
  }

  // A block of at least `bytes` that is busy on behalf of worker `reader`.
  Taken take(std::size_t bytes, int reader) {
    std::lock_guard<std::mutex> guard(mutex_);
    std::size_t capacity = size_class(bytes);
    for (auto& each : blocks_) {
      if (each.block->capacity() == capacity && claim(each, reader)) return {each.id, each.block};
    }
    if (!make_room(capacity)) return {0, nullptr};
    auto block = Block::create(path(++last_), capacity);
    if (!block) return {0, nullptr};
    block->state().store(uint32_t(BlockState::kBusy));
    total_ += capacity;
    blocks_.push_back({last_, block, reader});
    return {last_, block};
  }

  // Take back what a worker that is no more had not freed.
  void reclaim(int reader) {
    std::lock_guard<std::mutex> guard(mutex_);
    for (auto& each : blocks_) {
      if (each.reader == reader) each.block->free();
    }
  }

  std::size_t total() {
    std::lock_guard<std::mutex> guard(mutex_);
    return total_;
  }

 private:
  struct Entry {
    uint64_t id;
    std::shared_ptr<Block> block;
    int reader;
  };

  // Four sizes to a power of two: at most a quarter of a block is wasted, and sizes are met again.
  static std::size_t size_class(std::size_t bytes) {
    std::size_t step = std::max<std::size_t>(std::bit_floor(bytes) / 4, 4096);
    return (bytes + step - 1) / step * step;
  }

  bool claim(Entry& entry, int reader) {
    uint32_t free = uint32_t(BlockState::kFree);
    if (!entry.block->state().compare_exchange_strong(free, uint32_t(BlockState::kBusy)))
      return false;
    entry.reader = reader;
    return true;
  }

  bool make_room(std::size_t capacity) {
    for (auto each = blocks_.begin(); total_ + capacity > limit_ && each != blocks_.end();) {
      if (claim(*each, -1)) {
        remove(*each);
        total_ -= each->block->capacity();
        each = blocks_.erase(each);
      } else {
        ++each;
      }
    }
    return total_ + capacity <= limit_;
  }

  void remove(const Entry& entry) {
    entry.block->state().store(uint32_t(BlockState::kGone));
    unlink(path(entry.id).c_str());
  }

  std::string path(uint64_t id) const { return prefix_ + std::to_string(id); }

  std::mutex mutex_;
  std::string prefix_;
  std::size_t limit_ = 0;
  std::size_t total_ = 0;
  uint64_t last_ = 0;
  std::list<Entry> blocks_;
};

// The blocks of other workers' arenas that this worker has mapped.
class Attachments {
 public:
  // Null where there is no such block.
  std::shared_ptr<Block> get(const std::string& prefix, uint64_t id) {
    std::string path = prefix + std::to_string(id);
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = blocks_.find(path);
    if (found != blocks_.end()) return found->second;
    std::erase_if(blocks_, [](const auto& each) {
      return each.second->state().load() == uint32_t(BlockState::kGone);
    });
    auto block = Block::open(path);
    if (block) blocks_.emplace(path, block);
    return block;
  }

  // Unmap what belonged to a worker that is no more; tensors keep their own block.
  void forget(const std::string& prefix) {
    std::lock_guard<std::mutex> guard(mutex_);
    std::erase_if(blocks_, [&](const auto& each) { return each.first.starts_with(prefix); });
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Block>> blocks_;
};

}  // namespace rankcall
