// The format of messages.
//
// A message is a head and, after it, one part for each large buffer that does not go through shared
// memory. The head: Header, `buffers` Slots, `tensors` DeviceTags, payload, pickle, and then the
// small buffers one after the other. All numbers are little-endian.
//
// Within a host a message is one ZeroMQ message, a frame for the head and one for each part. Between
// hosts it is a sequence of ZeroMQ messages of two frames, a Chunk and at most kChunkBytes of data,
// so that heartbeats pass between the chunks, and a connection that has not been authenticated is
// closed as soon as it announces a larger frame.
//
// Nothing here trusts what it reads, and nothing here needs torch.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace rankcall {

constexpr uint32_t kMagic = 0x32524b52;       // "RKR2"
constexpr uint32_t kChunkMagic = 0x32434b52;  // "RKC2"
constexpr uint32_t kMaxBuffers = 1 << 16;
constexpr std::size_t kMaxNetworkFrame = 64 << 10;
constexpr std::size_t kChunkBytes = kMaxNetworkFrame - 256;  // CURVE adds some 33 bytes

// kFarewell: the sender has left. kRefusal: it has given the receiver up. The payload says why.
enum class Kind : uint8_t {
  kRequest = 1,
  kResponse = 2,
  kControl = 3,
  kControlReply = 4,
  kFarewell = 5,
  kRefusal = 6,
};

struct Header {
  uint32_t magic;
  uint8_t kind;
  uint8_t padding[3];
  uint64_t from_session;  // one for each life of an agent
  uint64_t to_session;
  uint64_t call;  // unique within from_session; an answer has the call of its request
  int64_t message_id;
  uint64_t payload_bytes;
  uint64_t pickle_bytes;
  int32_t type;  // torch's MessageType
  uint32_t buffers;
  uint32_t tensors;
  uint32_t reserved;
};
static_assert(sizeof(Header) == 72);

// kShared: a block of the sender's shared memory. kReturned: one of the receiver's, which goes back.
enum class Where : uint32_t { kPacked = 0, kPart = 1, kShared = 2, kReturned = 3 };

struct Slot {  // one buffer
  uint32_t where;
  uint32_t block;  // this and the two below: of the shared memory
  uint64_t bytes;
  uint64_t slab;
  uint64_t generation;
};
static_assert(sizeof(Slot) == 32);

struct DeviceTag {  // the receiver's device for a tensor; CPU is {0, -1}
  int8_t type;
  int8_t index;
};

struct Chunk {
  uint32_t magic;
  uint32_t part;  // 0 is the head
  uint64_t session;
  uint64_t transfer;  // counts the messages from one session
  uint64_t offset;    // of this chunk within its part
  uint64_t bytes;     // of the whole part
};
static_assert(sizeof(Chunk) == 40);

struct WireError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Bytes and what keeps them alive.
struct Bytes {
  const char* data = nullptr;
  std::size_t size = 0;
  std::shared_ptr<const void> owner;
};

// A head that is consistent within itself. The pointers are into it.
struct Parsed {
  Header header;
  std::vector<Slot> slots;
  std::vector<DeviceTag> tags;
  const char* payload;
  const char* pickle;
  std::vector<const char*> packed;   // for each slot; null if the buffer is not in the head
  std::vector<uint64_t> part_sizes;  // of the parts that must follow the head
};

namespace detail {

// Takes `bytes` off the front of what is left, or throws.
class Cursor {
 public:
  Cursor(const char* data, std::size_t size) : at_(data), left_(size) {}

  const char* take(uint64_t bytes, const char* what) {
    if (bytes > left_) throw WireError(std::string("the head ends within its ") + what);
    const char* taken = at_;
    at_ += bytes;
    left_ -= bytes;
    return taken;
  }

  template <class Record>
  std::vector<Record> take_records(uint32_t count, const char* what) {
    const char* from = take(uint64_t(count) * sizeof(Record), what);
    std::vector<Record> records(count);
    if (count) std::memcpy(records.data(), from, count * sizeof(Record));
    return records;
  }

  std::size_t left() const { return left_; }

 private:
  const char* at_;
  std::size_t left_;
};

}  // namespace detail

// Throws WireError unless all that the head announces lies within it or is a part.
inline Parsed parse_head(const char* data, std::size_t size) {
  detail::Cursor cursor(data, size);
  Parsed parsed;
  Header& header = parsed.header;
  std::memcpy(&header, cursor.take(sizeof header, "header"), sizeof header);
  if (header.magic != kMagic) throw WireError("not a rankcall message");
  if (header.kind < uint8_t(Kind::kRequest) || header.kind > uint8_t(Kind::kRefusal))
    throw WireError("unknown kind of message");
  if (header.buffers > kMaxBuffers || header.tensors > kMaxBuffers)
    throw WireError("too many buffers");
  parsed.slots = cursor.take_records<Slot>(header.buffers, "table of buffers");
  parsed.tags = cursor.take_records<DeviceTag>(header.tensors, "devices");
  parsed.payload = cursor.take(header.payload_bytes, "payload");
  parsed.pickle = cursor.take(header.pickle_bytes, "pickle");
  for (const Slot& slot : parsed.slots) {
    const char* packed = nullptr;
    if (slot.where == uint32_t(Where::kPacked)) {
      packed = cursor.take(slot.bytes, "buffers");
    } else if (slot.where == uint32_t(Where::kPart)) {
      parsed.part_sizes.push_back(slot.bytes);
    } else if (slot.where > uint32_t(Where::kReturned)) {
      throw WireError("a buffer is in an unknown place");
    }
    parsed.packed.push_back(packed);
  }
  if (cursor.left() != 0) throw WireError("the head is longer than it says");
  return parsed;
}

// A whole message.
struct Incoming {
  Bytes head;
  std::vector<Bytes> parts;
  Parsed parsed;
};

// Throws WireError unless the parts are those that the head announces.
inline Incoming parse_message(Bytes head, std::vector<Bytes> parts) {
  Parsed parsed = parse_head(head.data, head.size);
  bool matches = parts.size() == parsed.part_sizes.size();
  for (std::size_t i = 0; matches && i < parts.size(); i++)
    matches = parts[i].size == parsed.part_sizes[i];
  if (!matches) throw WireError("the frames are not those that the head announces");
  return {std::move(head), std::move(parts), std::move(parsed)};
}

inline std::optional<Chunk> parse_chunk(const char* data, std::size_t size) {
  Chunk chunk;
  if (size != sizeof chunk) return std::nullopt;
  std::memcpy(&chunk, data, sizeof chunk);
  if (chunk.magic != kChunkMagic) return std::nullopt;
  return chunk;
}

// Puts messages together from their chunks. Chunks of one session come in order: a connection keeps
// the order, and there is one for each session. Memory for a part is allocated when its first
// chunk is here, and never more than `max_bytes`.
class Assembler {
 public:
  explicit Assembler(uint64_t max_bytes) : max_bytes_(max_bytes) {}

  // Returns the message that this chunk completes, if it does. A session that is not `known` may
  // only send messages of one chunk. Throws WireError, and forgets what it has of the message.
  std::optional<Incoming> add(const Chunk& chunk, const char* data, std::size_t size, bool known) {
    std::lock_guard<std::mutex> guard(mutex_);
    Message message;
    auto node = messages_.extract(chunk.session);  // put back if all is well
    if (node) message = std::move(node.mapped());
    if (chunk.part == 0 && chunk.offset == 0) message = Message{.transfer = chunk.transfer};
    if (!known && size != chunk.bytes) throw WireError("a stranger sends more than one chunk");
    begin_part(message, chunk);
    if (size > message.size - message.filled || (size == 0 && message.size != 0))
      throw WireError("a chunk does not fit its part");
    if (size) std::memcpy(message.target + message.filled, data, size);
    message.filled += size;
    if (message.filled == message.size && end_part(message)) {
      Bytes head = std::move(message.parts.front());
      message.parts.erase(message.parts.begin());
      return parse_message(std::move(head), std::move(message.parts));
    }
    if (!known) throw WireError("a stranger sends more than one part");
    messages_[chunk.session] = std::move(message);
    return std::nullopt;
  }

  void forget(uint64_t session) {
    std::lock_guard<std::mutex> guard(mutex_);
    messages_.erase(session);
  }

 private:
  struct Message {
    uint64_t transfer = 0;
    std::vector<Bytes> parts;  // complete ones; the head comes first
    std::vector<uint64_t> sizes;  // of the parts after the head, once it is complete
    std::shared_ptr<char> memory;
    char* target = nullptr;
    uint64_t size = 0, filled = 0;
  };

  void begin_part(Message& message, const Chunk& chunk) const {
    if (chunk.transfer != message.transfer || chunk.part != message.parts.size() ||
        chunk.offset != message.filled)
      throw WireError("a chunk is out of order");
    if (chunk.offset != 0) return;
    if (chunk.part > 0 && chunk.bytes != message.sizes[chunk.part - 1])
      throw WireError("a part is not as large as the head announces");
    if (chunk.bytes > max_bytes_) throw WireError("a part is larger than max_message_bytes");
    constexpr std::align_val_t alignment{64};  // as torch's own allocator
    message.target = static_cast<char*>(::operator new(chunk.bytes, alignment));
    message.memory = std::shared_ptr<char>(
        message.target, [](char* memory) { ::operator delete(memory, alignment); });
    message.size = chunk.bytes;
  }

  // Returns whether that was the last part.
  static bool end_part(Message& message) {
    message.parts.push_back({message.target, message.size, std::move(message.memory)});
    message.size = message.filled = 0;
    if (message.parts.size() == 1)
      message.sizes = parse_head(message.parts[0].data, message.parts[0].size).part_sizes;
    return message.parts.size() == message.sizes.size() + 1;
  }

  const uint64_t max_bytes_;
  std::mutex mutex_;
  std::map<uint64_t, Message> messages_;
};

}  // namespace rankcall
