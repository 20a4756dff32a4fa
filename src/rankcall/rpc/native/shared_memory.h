// Shared memory for large buffers between workers of one host: written once, read in place.
//
// A slab is a file on a tmpfs that holds blocks of one capacity. A worker makes slabs for one reader
// each. The reader's tensors lie in the blocks; when a tensor is freed, its reader frees the block
// with a compare-and-swap, without a message. The word of a block is 2 * generation + 1 while it is
// in use: a reader that was sent generation 5 cannot free generation 6.
//
// A reader that has no more use for a block may also send it back as it is, in a message. Then the
// owner reads it, and frees it in the same way.
//
// When a reader leaves or is given up, its slabs are unlinked and unmapped here, and never used
// again: the reader may still have tensors in them, and keeps the memory through its own mapping.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace rankcall {

constexpr std::size_t kSlabHeader = 4096;  // keeps the blocks page-aligned
constexpr uint32_t kMaxBlocks = 256;  // their words fit into the header's page
// Unless one block is larger. A slab is given up as a whole, once no reader has a tensor in it, and
// a slab of fewer blocks gets there sooner.
constexpr std::size_t kMaxSlabBytes = 16 << 20;
constexpr uint64_t kSlabMagic = 0x42414c534b52;  // "RKSLAB"

struct SlabHeader {
  uint64_t magic;
  uint64_t blocks;
  uint64_t capacity;            // of each block, a multiple of the page size
  std::atomic<uint64_t> freed;  // how often a reader freed a block: tells the owner to look
  std::atomic<uint64_t> retired;
  std::atomic<uint64_t> words[kMaxBlocks];
};
static_assert(sizeof(SlabHeader) <= kSlabHeader);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

inline uint64_t word_in_use(uint64_t generation) { return 2 * generation + 1; }

// A mapped slab. The geometry is copied: the file may be changed by the other side at any time.
class Slab {
 public:
  Slab(void* base, std::size_t size, uint32_t blocks, std::size_t capacity)
      : base_(static_cast<char*>(base)), size_(size), blocks_(blocks), capacity_(capacity) {}
  ~Slab() { munmap(base_, size_); }
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  uint32_t blocks() const { return blocks_; }
  std::size_t capacity() const { return capacity_; }
  std::size_t size() const { return size_; }
  SlabHeader& header() const { return *reinterpret_cast<SlabHeader*>(base_); }
  char* data(uint32_t block) const { return base_ + kSlabHeader + block * capacity_; }

  bool holds(uint32_t block, uint64_t generation, std::size_t bytes) const {
    return block < blocks_ && bytes <= capacity_ &&
           header().words[block].load(std::memory_order_acquire) == word_in_use(generation);
  }

  // Does nothing if the block is not of this generation any more, whatever a peer has sent.
  void release(uint32_t block, uint64_t generation) const {
    uint64_t in_use = word_in_use(generation);
    if (header().words[block].compare_exchange_strong(in_use, 2 * generation))
      header().freed.fetch_add(1);
  }

  // Null if the file is not a slab of this user's, or cannot be mapped.
  static std::shared_ptr<Slab> open(const std::string& path) {
    int fd = ::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return nullptr;
    struct stat about;
    bool ours = fstat(fd, &about) == 0 && S_ISREG(about.st_mode) && about.st_uid == geteuid() &&
                std::size_t(about.st_size) > kSlabHeader;
    void* base = ours ? map(fd, about.st_size) : nullptr;
    ::close(fd);
    if (!base) return nullptr;
    auto& header = *static_cast<SlabHeader*>(base);
    std::size_t room = about.st_size - kSlabHeader;
    uint64_t blocks = header.blocks, capacity = header.capacity;
    bool fits = header.magic == kSlabMagic && blocks - 1 < kMaxBlocks && capacity <= room / blocks;
    if (fits) return std::make_shared<Slab>(base, about.st_size, blocks, capacity);
    munmap(base, about.st_size);
    return nullptr;
  }

  // Null if there is no room: the pages are reserved, as touching a missing one is a SIGBUS.
  static std::shared_ptr<Slab> create(const std::string& path, uint32_t blocks,
                                      std::size_t capacity) {
    int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) return nullptr;
    std::size_t size = kSlabHeader + blocks * capacity;
    void* base = posix_fallocate(fd, 0, off_t(size)) == 0 ? map(fd, size) : nullptr;
    ::close(fd);
    if (!base) {
      unlink(path.c_str());
      return nullptr;
    }
    auto& header = *static_cast<SlabHeader*>(base);
    header.magic = kSlabMagic;
    header.blocks = blocks;
    header.capacity = capacity;
    return std::make_shared<Slab>(base, size, blocks, capacity);
  }

 private:
  static void* map(int fd, std::size_t size) {
    void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    return base == MAP_FAILED ? nullptr : base;
  }

  char* base_;
  std::size_t size_;
  uint32_t blocks_;
  std::size_t capacity_;
};

// One block in use. It is freed with this object, unless it was handed on.
class BlockInUse {
 public:
  BlockInUse() = default;
  BlockInUse(std::shared_ptr<Slab> slab, uint64_t slab_id, uint32_t block, uint64_t generation)
      : slab_(std::move(slab)), slab_id_(slab_id), block_(block), generation_(generation) {}
  ~BlockInUse() {
    if (slab_) slab_->release(block_, generation_);
  }
  BlockInUse(BlockInUse&&) = default;
  BlockInUse& operator=(BlockInUse&& other) {
    std::swap(slab_, other.slab_);
    std::swap(slab_id_, other.slab_id_);
    std::swap(block_, other.block_);
    std::swap(generation_, other.generation_);
    return *this;
  }

  explicit operator bool() const { return slab_ != nullptr; }
  bool is_in(const std::shared_ptr<Slab>& slab) const { return slab_ && slab_ == slab; }
  char* data() const { return slab_->data(block_); }
  uint64_t slab_id() const { return slab_id_; }
  uint32_t block() const { return block_; }
  uint64_t generation() const { return generation_; }
  void hand_on() { slab_.reset(); }

 private:
  std::shared_ptr<Slab> slab_;
  uint64_t slab_id_ = 0;
  uint32_t block_ = 0;
  uint64_t generation_ = 0;
};

// The slabs that this worker writes. A reader is named by its session.
class OwnSlabs {
 public:
  void open(std::string prefix, std::size_t limit) {
    prefix_ = std::move(prefix);
    limit_ = limit;
  }

  ~OwnSlabs() {
    for (auto& [key, entries] : entries_)
      for (auto& entry : entries) retire(entry);
  }

  // A block of at least `bytes` for a reader; empty if there is no room.
  BlockInUse take(std::size_t bytes, uint64_t reader) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (closed_.count(reader)) return {};
    std::size_t capacity = size_class(bytes);
    auto& entries = entries_[{reader, capacity}];
    for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
      if (!find_free(*entry)) continue;
      return use(*entry);
    }
    if (!add_slab(entries, capacity)) return {};
    return use(entries.back());
  }

  // The slab of a reader; null if it has none with this id.
  std::shared_ptr<Slab> find(uint64_t id, uint64_t reader) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto last = entries_.upper_bound({reader, SIZE_MAX});
    for (auto each = entries_.lower_bound({reader, 0}); each != last; ++each)
      for (auto& entry : each->second)
        if (entry.id == id) return entry.slab;
    return nullptr;
  }

  // Gives up all slabs of a reader, for ever.
  void close(uint64_t reader) {
    std::lock_guard<std::mutex> guard(mutex_);
    closed_.insert(reader);
    auto first = entries_.lower_bound({reader, 0});
    auto last = entries_.upper_bound({reader, SIZE_MAX});
    for (auto each = first; each != last; ++each)
      for (auto& entry : each->second) retire(entry);
    entries_.erase(first, last);
  }

  std::size_t total() {
    std::lock_guard<std::mutex> guard(mutex_);
    return total_;
  }

 private:
  struct Entry {
    uint64_t id;
    std::shared_ptr<Slab> slab;
    uint32_t last = 0;           // the block that was used last
    std::vector<uint32_t> free;  // other blocks that are known to be free
    uint64_t freed = 0;          // the header's count when `free` was filled
  };

  // Four capacities to a power of two: at most a quarter is wasted, and blocks are used again.
  static std::size_t size_class(std::size_t bytes) {
    std::size_t step = std::max<std::size_t>(std::bit_floor(bytes) / 4, 4096);
    return (bytes + step - 1) / step * step;
  }

  static bool is_free(const Slab& slab, uint32_t block) {
    return !(slab.header().words[block].load(std::memory_order_acquire) & 1);
  }

  // Puts a free block at the end of `free`: the one that was used last if it is free again, as it
  // may still be in the processor's cache. Looks at all only if one was freed since the last look.
  static bool find_free(Entry& entry) {
    if (is_free(*entry.slab, entry.last)) {
      entry.free.push_back(entry.last);
      return true;
    }
    uint64_t freed = entry.slab->header().freed.load();
    if (!entry.free.empty() || freed == entry.freed) return !entry.free.empty();
    entry.freed = freed;
    for (uint32_t block = 0; block < entry.slab->blocks(); block++)
      if (is_free(*entry.slab, block)) entry.free.push_back(block);
    return !entry.free.empty();
  }

  BlockInUse use(Entry& entry) {
    uint32_t block = entry.last = entry.free.back();
    entry.free.pop_back();
    entry.slab->header().words[block].store(word_in_use(++generation_));
    return {entry.slab, entry.id, block, generation_};
  }

  // The first slab of a kind is small, as a page that is never used costs time as well.
  bool add_slab(std::vector<Entry>& entries, std::size_t capacity) {
    std::size_t blocks = 1;
    for (const auto& entry : entries) blocks += entry.slab->blocks();
    blocks = std::min<std::size_t>({blocks, kMaxBlocks, std::max(kMaxSlabBytes / capacity, 1ul)});
    if (!make_room(kSlabHeader + blocks * capacity)) return false;
    auto slab = Slab::create(path(++last_), uint32_t(blocks), capacity);
    if (!slab) return false;
    total_ += slab->size();
    Entry entry{last_, std::move(slab)};  // its block 0 is used next
    for (uint32_t block = uint32_t(blocks); block > 0;) entry.free.push_back(--block);
    entries.push_back(std::move(entry));
    return true;
  }

  // Gives up slabs that no reader has a tensor in, until there is room.
  bool make_room(std::size_t bytes) {
    for (auto& [key, entries] : entries_) {
      if (total_ + bytes <= limit_) break;
      std::erase_if(entries, [&](Entry& entry) {
        bool unused = total_ + bytes > limit_ && is_unused(*entry.slab);
        if (unused) retire(entry);
        return unused;
      });
    }
    return total_ + bytes <= limit_;
  }

  static bool is_unused(const Slab& slab) {
    for (uint32_t block = 0; block < slab.blocks(); block++)
      if (!is_free(slab, block)) return false;
    return true;
  }

  void retire(Entry& entry) {
    entry.slab->header().retired.store(1);
    unlink(path(entry.id).c_str());
    total_ -= entry.slab->size();
  }

  std::string path(uint64_t id) const { return prefix_ + std::to_string(id); }

  std::mutex mutex_;
  std::string prefix_;
  std::size_t limit_ = 0;
  std::size_t total_ = 0;
  uint64_t last_ = 0;
  uint64_t generation_ = 0;  // one counter for all blocks, so that none gets a number twice
  std::map<std::pair<uint64_t, std::size_t>, std::vector<Entry>> entries_;
  std::set<uint64_t> closed_;
};

// The slabs of other workers that this worker has mapped. A tensor keeps its own slab.
class OthersSlabs {
 public:
  // Null if there is no such slab.
  std::shared_ptr<Slab> get(const std::string& prefix, uint64_t id) {
    std::string path = prefix + std::to_string(id);
    std::lock_guard<std::mutex> guard(mutex_);
    if (closed_.count(prefix)) return nullptr;
    auto found = slabs_.find(path);
    if (found != slabs_.end()) return found->second;
    // A good moment to drop those that their writer has given up: it sends no message about that.
    std::erase_if(slabs_, [](const auto& each) { return each.second->header().retired.load(); });
    auto slab = Slab::open(path);
    if (slab) slabs_.emplace(path, slab);
    return slab;
  }

  // Unmaps the slabs of a worker that is gone.
  void close(const std::string& prefix) {
    std::lock_guard<std::mutex> guard(mutex_);
    closed_.insert(prefix);
    std::erase_if(slabs_, [&](const auto& each) { return each.first.starts_with(prefix); });
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Slab>> slabs_;
  std::set<std::string> closed_;
};

}  // namespace rankcall
