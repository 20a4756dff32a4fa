#include "collectives.h"

#include <algorithm>
#include <cstring>
#include <memory>

namespace simulated {
namespace {

// What a rank takes from one other rank at a time: half a ring, so that the two work at once.
constexpr size_t CHUNK = 128 << 10;
// Up to this size every rank sends all of its data to all others, which needs one exchange only.
constexpr size_t SMALL = 32 << 10;

// Transfers that go forward together. Those between the same two ranks keep their order. Since no
// transfer waits for another rank's, an exchange cannot deadlock, whatever the others do.
class Exchange {
 public:
  Exchange(Communicator& communicator, Channel channel) : communicator_(communicator), channel_(channel) {}

  void push(int peer, const char* data, size_t bytes) {
    transfers_.push_back({true, peer, const_cast<char*>(data), bytes});
  }
  void pull(int peer, char* data, size_t bytes) { transfers_.push_back({false, peer, data, bytes}); }

  // False if the communicator was aborted.
  bool run() {
    bool done = communicator_.until([&] { return advance(); });
    transfers_.clear();
    return done;
  }

 private:
  struct Transfer {
    bool is_push;
    int peer;
    char* data;
    size_t left;
  };

  bool advance() {
    bool all = true;
    std::vector<char> taken(2 * communicator_.size);  // an earlier transfer in that direction is unfinished
    for (Transfer& transfer : transfers_) {
      if (!transfer.left) continue;
      char& busy = taken[2 * transfer.peer + transfer.is_push];
      if (!busy && !communicator_.link_stalls(transfer.peer)) move(transfer);
      busy = transfer.left > 0;
      all = all && !transfer.left;
    }
    return all;
  }

  void move(Transfer& transfer) {
    Wire& wire = communicator_.wire();
    for (;;) {
      size_t moved = transfer.is_push ? wire.push(channel_, transfer.peer, transfer.data, transfer.left)
                                      : wire.pull(channel_, transfer.peer, transfer.data, transfer.left);
      transfer.data += moved;
      transfer.left -= moved;
      if (!moved || !transfer.left) return;
    }
  }

  Communicator& communicator_;
  const Channel channel_;
  std::vector<Transfer> transfers_;
};

class Collective {
 public:
  Collective(Communicator& communicator, const Task& task)
      : communicator_(communicator),
        task_(task),
        exchange_(communicator, Collectives),
        element_(size_of(task.type)),
        op_(task.op) {
    PreMultiply own;
    if (task.op >= ncclNumOps && communicator.find_operator(task.op, &own)) {
      scale_ = own.device_scalar ? scalar(own.type, own.device_scalar) : own.value;
      scaled_ = true;
      op_ = ncclSum;
    }
  }

  bool run() {
    const size_t bytes = task_.count * element_;
    switch (task_.kind) {
      case Task::AllReduce:
        return communicator_.size > 2 && bytes > SMALL ? all_reduce_in_two_steps() : all_reduce_at_once();
      case Task::ReduceScatter: return reduce_scatter();
      case Task::Reduce: return reduce_to_root();
      case Task::Broadcast: return broadcast(bytes);
      case Task::AllGather: return gather(bytes, true);
      case Task::Gather: return gather(bytes, false);
      case Task::Scatter: return scatter(bytes);
      case Task::AllToAll: return all_to_all(bytes);
      default: return true;
    }
  }

 private:
  template <class F>
  void for_peers(F f) {
    for (int peer = 0; peer < communicator_.size; ++peer)
      if (peer != communicator_.rank) f(peer);
  }
  static void place(char* to, const char* from, size_t bytes) {
    if (to != from) memmove(to, from, bytes);
  }
  size_t chunk_elements() const { return CHUNK / element_; }
  char* scratch(int peer) { return scratch_.get() + peer * scratch_bytes_; }
  // Not more than is pulled at a time, and not set to zero: that would take longer than a small operation.
  void make_scratch() {
    scratch_bytes_ = std::min(chunk_elements(), task_.count) * element_;
    scratch_.reset(new char[communicator_.size * scratch_bytes_]);
  }

  // Pulls `count` elements of every peer and combines them with this rank's own.
  bool pull_and_reduce(char* out, const char* own, size_t count) {
    for_peers([&](int peer) { exchange_.pull(peer, scratch(peer), count * element_); });
    if (!exchange_.run()) return false;
    std::vector<const char*> inputs;
    for (int rank = 0; rank < communicator_.size; ++rank)
      inputs.push_back(rank == communicator_.rank ? own : scratch(rank));
    reduce(out, inputs, count, task_.type, op_, scaled_ ? &scale_ : nullptr);
    return true;
  }

  bool all_reduce_at_once() {
    make_scratch();
    for (size_t done = 0; done < task_.count;) {
      size_t count = std::min(chunk_elements(), task_.count - done), at = done * element_;
      for_peers([&](int peer) { exchange_.push(peer, task_.in + at, count * element_); });
      if (!pull_and_reduce(task_.out + at, task_.in + at, count)) return false;
      done += count;
    }
    return true;
  }

  // Each rank reduces one piece of the data and sends the result to all others.
  bool all_reduce_in_two_steps() {
    make_scratch();
    const size_t size = communicator_.size;
    for (size_t done = 0; done < task_.count;) {
      size_t window = std::min(chunk_elements() * size, task_.count - done), piece = (window + size - 1) / size;
      auto begin = [&](int rank) { return done + std::min<size_t>(rank * piece, window); };
      auto length = [&](int rank) { return begin(rank + 1) - begin(rank); };
      const int rank = communicator_.rank;
      for_peers([&](int peer) { exchange_.push(peer, task_.in + begin(peer) * element_, length(peer) * element_); });
      char* own = task_.out + begin(rank) * element_;
      if (!pull_and_reduce(own, task_.in + begin(rank) * element_, length(rank))) return false;
      for_peers([&](int peer) {
        exchange_.push(peer, own, length(rank) * element_);
        exchange_.pull(peer, task_.out + begin(peer) * element_, length(peer) * element_);
      });
      if (!exchange_.run()) return false;
      done += window;
    }
    return true;
  }

  bool reduce_scatter() {
    make_scratch();
    const size_t bytes = task_.count * element_;
    for (size_t done = 0; done < task_.count;) {
      size_t count = std::min(chunk_elements(), task_.count - done), at = done * element_;
      for_peers([&](int peer) { exchange_.push(peer, task_.in + peer * bytes + at, count * element_); });
      if (!pull_and_reduce(task_.out + at, task_.in + communicator_.rank * bytes + at, count)) return false;
      done += count;
    }
    return true;
  }

  bool reduce_to_root() {
    if (communicator_.rank != task_.root) {
      exchange_.push(task_.root, task_.in, task_.count * element_);
      return exchange_.run();
    }
    make_scratch();
    for (size_t done = 0; done < task_.count;) {
      size_t count = std::min(chunk_elements(), task_.count - done), at = done * element_;
      if (!pull_and_reduce(task_.out + at, task_.in + at, count)) return false;
      done += count;
    }
    return true;
  }

  bool broadcast(size_t bytes) {
    if (communicator_.rank == task_.root) {
      for_peers([&](int peer) { exchange_.push(peer, task_.in, bytes); });
      place(task_.out, task_.in, bytes);
    } else {
      exchange_.pull(task_.root, task_.out, bytes);
    }
    return exchange_.run();
  }

  bool gather(size_t bytes, bool to_all) {
    const bool receives = to_all || communicator_.rank == task_.root;
    for_peers([&](int peer) {
      if (to_all || peer == task_.root) exchange_.push(peer, task_.in, bytes);
      if (receives) exchange_.pull(peer, task_.out + peer * bytes, bytes);
    });
    if (receives) place(task_.out + communicator_.rank * bytes, task_.in, bytes);
    return exchange_.run();
  }

  bool scatter(size_t bytes) {
    if (communicator_.rank != task_.root) {
      exchange_.pull(task_.root, task_.out, bytes);
      return exchange_.run();
    }
    for_peers([&](int peer) { exchange_.push(peer, task_.in + peer * bytes, bytes); });
    place(task_.out, task_.in + communicator_.rank * bytes, bytes);
    return exchange_.run();
  }

  bool all_to_all(size_t bytes) {
    for_peers([&](int peer) {
      exchange_.push(peer, task_.in + peer * bytes, bytes);
      exchange_.pull(peer, task_.out + peer * bytes, bytes);
    });
    place(task_.out + communicator_.rank * bytes, task_.in + communicator_.rank * bytes, bytes);
    return exchange_.run();
  }

  Communicator& communicator_;
  const Task& task_;
  Exchange exchange_;
  const size_t element_;
  int op_;
  double scale_ = 1;
  bool scaled_ = false;
  size_t scratch_bytes_ = 0;
  std::unique_ptr<char[]> scratch_;
};

}  // namespace

void run_tasks(Communicator& communicator, const std::vector<Task>& tasks) {
  Exchange messages(communicator, Messages);
  bool any = false;
  for (const Task& task : tasks) {
    if (!task.is_message()) {
      if (!Collective(communicator, task).run()) return;
      continue;
    }
    any = true;
    size_t bytes = task.count * size_of(task.type);
    if (task.kind == Task::Send) messages.push(task.root, task.in, bytes);
    else messages.pull(task.root, task.out, bytes);
  }
  if (any) messages.run();
}

}  // namespace simulated
