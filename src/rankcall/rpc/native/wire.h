// What stands on the wire: one head frame, then a frame for each large buffer.
//
// Head frame: Header, `buffers` Slots, `tensors` DeviceTags, payload, pickle, then the packed
// buffers one behind the other. Everything is little-endian. Nothing here trusts what it reads.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace rankcall {

constexpr uint32_t kMagic = 0x31524b52;  // "RKR1"
constexpr uint32_t kMaxBuffers = 1 << 16;

enum class Kind : uint8_t { kRequest = 1, kResponse = 2, kControl = 3, kControlReply = 4, kBye = 5 };

struct Header {
  uint32_t magic;
  uint8_t kind;
  uint8_t padding[3];
  uint64_t from_session;  // of the agents' lives: what belongs to a former one is dropped
  uint64_t to_session;
  uint64_t call;  // answers carry their question's
  int64_t message_id;
  uint64_t payload_bytes;
  uint64_t pickle_bytes;
  int32_t type;  // torch's MessageType
  int32_t from;  // worker id
  uint32_t buffers;
  uint32_t tensors;
};
static_assert(sizeof(Header) == 72);

enum class Where : uint32_t { kPacked = 0, kFrame = 1, kArena = 2 };

struct Slot {
  uint32_t where;
  uint32_t padding;
  uint64_t bytes;
  uint64_t block;  // in the sender's arena
};
static_assert(sizeof(Slot) == 24);

struct DeviceTag {  // where the receiver is to put a tensor; CPU is {0, -1}
  int8_t type;
  int8_t index;
};

struct WireError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A head frame that has been checked against its frames. The pointers are into that frame.
struct Parsed {
  Header header;
  std::vector<Slot> slots;
  std::vector<DeviceTag> tags;
  const char* payload;
  const char* pickle;
  std::vector<const char*> packed;  // of each slot, null for those that are elsewhere
};

namespace detail {

// Takes `bytes` off the front of what is left, or refuses.
class Cursor {
 public:
  Cursor(const char* data, std::size_t size) : at_(data), left_(size) {}

  const char* take(uint64_t bytes, const char* what) {
    if (bytes > left_) throw WireError(std::string("the head frame ends within its ") + what);
    const char* taken = at_;
    at_ += bytes;
    left_ -= bytes;
    return taken;
  }

  std::size_t left() const { return left_; }

 private:
  const char* at_;
  std::size_t left_;
};

}  // namespace detail

inline Header parse_header(detail::Cursor& cursor) {
  Header header;
  std::memcpy(&header, cursor.take(sizeof header, "header"), sizeof header);
  if (header.magic != kMagic) throw WireError("not a rankcall message");
  if (header.kind < uint8_t(Kind::kRequest) || header.kind > uint8_t(Kind::kBye))
    throw WireError("unknown kind of message");
  if (header.buffers > kMaxBuffers || header.tensors > kMaxBuffers)
    throw WireError("too many buffers");
  return header;
}

// Throws WireError unless the head frame is whole and says exactly what `frames` are.
inline Parsed parse(const char* data, std::size_t size, const std::vector<std::size_t>& frames) {
  detail::Cursor cursor(data, size);
  Parsed parsed;
  parsed.header = parse_header(cursor);
  const Header& header = parsed.header;
  const char* slots = cursor.take(uint64_t(header.buffers) * sizeof(Slot), "table of buffers");
  const char* tags = cursor.take(uint64_t(header.tensors) * sizeof(DeviceTag), "devices");
  parsed.slots.resize(header.buffers);
  parsed.tags.resize(header.tensors);
  if (header.buffers) std::memcpy(parsed.slots.data(), slots, header.buffers * sizeof(Slot));
  if (header.tensors) std::memcpy(parsed.tags.data(), tags, header.tensors * sizeof(DeviceTag));
  parsed.payload = cursor.take(header.payload_bytes, "payload");
  parsed.pickle = cursor.take(header.pickle_bytes, "pickle");
  std::size_t frame = 0;
  for (const Slot& slot : parsed.slots) {
    const char* packed = nullptr;
    if (slot.where == uint32_t(Where::kPacked)) {
      packed = cursor.take(slot.bytes, "buffers");
    } else if (slot.where == uint32_t(Where::kFrame)) {
      if (frame == frames.size() || frames[frame++] != slot.bytes)
        throw WireError("the frames are not those that the head frame names");
    } else if (slot.where != uint32_t(Where::kArena)) {
      throw WireError("a buffer is in an unknown place");
    }
    parsed.packed.push_back(packed);
  }
  if (cursor.left() != 0 || frame != frames.size())
    throw WireError("there is more than the head frame names");
  return parsed;
}

}  // namespace rankcall
