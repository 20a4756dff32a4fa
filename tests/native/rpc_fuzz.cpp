// A fuzz target for the decoder of RPC messages (wire.h).
//
// An input is a sequence of ZeroMQ messages as an agent receives them. Each frame is a byte of flags,
// two bytes with its length, and its data. A model keeps what each session has sent; a message that
// the decoder puts together must have exactly those bytes, and all that it points to must lie in it.
//
// clang compiles it with libFuzzer. RANKCALL_FUZZ_MAIN adds a driver for other compilers: it changes
// the seeds at random, and does not look at coverage.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "wire.h"

using namespace rankcall;

namespace {

constexpr uint8_t kIsKnown = 1, kMoreFrames = 2;
constexpr uint64_t kMaxBytes = 1 << 16;

struct FramesOf {
  bool is_known;
  std::vector<Bytes> frames;
};

// The frames are exactly as large as they are, so that the sanitizer sees one byte further.
std::vector<FramesOf> messages_of(const uint8_t* data, std::size_t size) {
  std::vector<FramesOf> messages;
  bool more = false;
  while (size >= 3) {
    const uint8_t flags = data[0];
    std::size_t length = data[1] + 256 * data[2];
    data += 3, size -= 3;
    length = std::min(length, size);
    std::shared_ptr<char[]> frame(new char[length]);
    if (length) std::memcpy(frame.get(), data, length);
    data += length, size -= length;
    if (!more) messages.push_back({(flags & kIsKnown) != 0, {}});
    messages.back().frames.push_back({frame.get(), length, frame});
    more = flags & kMoreFrames;
  }
  return messages;
}

std::string text_of(const Bytes& bytes) { return {bytes.data, bytes.size}; }

// Reads all that a message refers to, and adds it up.
void check_whole(const Incoming& incoming) {
  const Parsed& parsed = incoming.parsed;
  const Header& header = parsed.header;
  const char* begin = incoming.head.data;
  const char* end = begin + incoming.head.size;
  std::size_t used = sizeof(Header) + parsed.slots.size() * sizeof(Slot) +
                     parsed.tags.size() * sizeof(DeviceTag);
  uint64_t sum = 0;
  auto read = [&](const char* data, uint64_t size) {
    CHECK(size == 0 || (data >= begin && data < end && size <= uint64_t(end - data)));
    for (uint64_t i = 0; i < size; i++) sum += uint8_t(data[i]);
    used += size;
  };
  read(parsed.payload, header.payload_bytes);
  read(parsed.pickle, header.pickle_bytes);
  std::size_t part = 0;
  CHECK(parsed.slots.size() == header.buffers && parsed.packed.size() == header.buffers);
  CHECK(parsed.tags.size() == header.tensors);
  for (std::size_t i = 0; i < parsed.slots.size(); i++) {
    const Slot& slot = parsed.slots[i];
    CHECK((slot.where == uint32_t(Where::kPacked)) == (parsed.packed[i] != nullptr));
    if (parsed.packed[i]) {
      read(parsed.packed[i], slot.bytes);
    } else if (slot.where == uint32_t(Where::kPart)) {
      CHECK(incoming.parts.at(part).size == slot.bytes);
      for (char byte : text_of(incoming.parts[part++])) sum += uint8_t(byte);
    }
  }
  CHECK(part == incoming.parts.size());
  CHECK(used == incoming.head.size);
  volatile uint64_t all = sum;
  (void)all;
}

// The chunks of a session since it began a message.
struct Sent {
  uint64_t transfer = 0;
  bool is_in_order = true;
  std::vector<std::string> parts;
};

void add_chunk(Assembler& assembler, std::map<uint64_t, Sent>& model, const Chunk& chunk,
               const Bytes& data, bool is_known) {
  Sent& sent = model[chunk.session];
  if (chunk.part == 0 && chunk.offset == 0) sent = Sent{chunk.transfer, true, {}};
  if (sent.parts.size() == chunk.part && chunk.offset == 0) sent.parts.emplace_back();
  if (sent.parts.size() == chunk.part + 1ull && sent.parts.back().size() == chunk.offset &&
      sent.transfer == chunk.transfer)
    sent.parts.back() += text_of(data);
  else
    sent.is_in_order = false;
  try {
    auto whole = assembler.add(chunk, data.data, data.size, is_known);
    if (!whole) {
      CHECK(is_known);  // nothing is kept of a stranger's
      return;
    }
    check_whole(*whole);
    CHECK(whole->head.size <= kMaxBytes);
    CHECK(sent.is_in_order);
    CHECK(text_of(whole->head) == sent.parts.at(0));
    CHECK(whole->parts.size() + 1 == sent.parts.size());
    for (std::size_t i = 0; i < whole->parts.size(); i++)
      CHECK(text_of(whole->parts[i]) == sent.parts[i + 1]);
  } catch (const WireError&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  Assembler assembler(kMaxBytes);
  std::map<uint64_t, Sent> model;
  for (auto& [is_known, frames] : messages_of(data, size)) {
    auto chunk = parse_chunk(frames[0].data, frames[0].size);
    if (chunk && frames.size() == 2) {
      add_chunk(assembler, model, *chunk, frames[1], is_known);
      continue;
    }
    try {
      Bytes head = frames[0];
      check_whole(parse_message(head, {frames.begin() + 1, frames.end()}));
    } catch (const WireError&) {
    }
  }
  return 0;
}

#ifdef RANKCALL_FUZZ_MAIN
#include <chrono>
#include <filesystem>
#include <fstream>
#include <random>

// SECONDS FOLDER: runs the seeds in the folder and changed ones.
int main(int, char** arguments) {
  std::vector<std::string> seeds;
  for (const auto& each : std::filesystem::directory_iterator(arguments[2])) {
    std::ifstream file(each.path(), std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  CHECK(!seeds.empty());
  std::mt19937_64 random(1);
  auto until = std::chrono::steady_clock::now() + std::chrono::seconds(std::atoi(arguments[1]));
  uint64_t runs = 0;
  for (; std::chrono::steady_clock::now() < until; runs++) {
    std::string input = seeds[random() % seeds.size()];
    for (unsigned changes = runs < seeds.size() ? 0 : 1 + random() % 6; changes > 0; changes--) {
      std::size_t at = random() % (input.size() + 1);
      std::size_t length = std::min<std::size_t>(input.size() - at, random() % 40);
      const std::string& other = seeds[random() % seeds.size()];
      switch (random() % 4) {
        case 0: input.replace(at, std::min<std::size_t>(length, 1), 1, char(random())); break;
        case 1: input.erase(at, length); break;
        case 2: input.insert(at, input.substr(at, length)); break;
        default: input.insert(at, other.substr(random() % (other.size() + 1), length));
      }
    }
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
  }
  std::fprintf(stderr, "Done %llu runs\n", (unsigned long long)runs);
}
#endif
