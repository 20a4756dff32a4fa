// Two c10d back ends on the simulated accelerator, modelled on ProcessGroupNCCL.
//
// They behave as ProcessGroupNCCL.cpp of torch 2.13 does, as far as reading it can tell:
// * A collective counts in one sequence, a point-to-point op in another; a coalesced block counts
//   once, at its first op.
// * A collective runs on the group's own stream, which waits for the caller's. Since torch 2.8 a
//   collective with asyncOp=false runs on the caller's stream instead and returns no Work. The
//   back end "own" does only the former, "caller" does either.
// * One communicator runs one op at a time, even if the ops are on several streams. An unbatched
//   point-to-point op has a communicator and a stream of its own for each peer.
// * A Work's future is completed at issue; wait() makes the caller's stream wait, not the host.
// * A watchdog goes through the list of outstanding Works and notes in the group's status what it
//   has seen start and complete. Both sequences share these three numbers. An op that is issued
//   while its stream is captured is not in that list, and neither is one inside a coalesced block.
// * The status of all groups is read as JSON, without entries or with: entries query the events.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/logger.hpp>

#include <c10/core/StreamGuard.h>

#include <list>
#include <memory>
#include <optional>

#include "device.h"

namespace simulated {

// A communicator: runs one op at a time.
struct Communicator {
  StreamId own_stream;
  StreamId last_stream;
  int64_t busy = 0;
};

class Work final : public c10d::Work {
 public:
  Work(c10d::OpType op, uint64_t seq, bool timing) : c10d::Work(-1, op), seq(seq), timing(timing) {}

  const uint64_t seq;
  const bool timing;
  StreamId stream;
  int64_t begin = 0, end = 0;
  bool captured = false;
  std::vector<at::Tensor> outputs;
  c10::intrusive_ptr<c10::ivalue::Future> future;

  bool isCompleted() override {
    machine().note_unsafe("isCompleted");
    return machine().now() >= end;
  }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    machine().wait(machine().current(stream.device), stream, end, captured, "wait");
  }
  void blockCurrentStream() override { synchronize(); }
  std::vector<at::Tensor> result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    machine().note_on_host("getFuture");
    return future;
  }
  uint64_t getSequencenumber() const override {
    machine().note_on_host("getSequencenumber");
    return seq;
  }
  float getDuration() const override {
    TORCH_CHECK(timing, "getDuration only works if timing was enabled");
    machine().note_unsafe("getDuration");
    return static_cast<float>((end - begin) / 1e6);
  }
};

class Backend final : public c10d::Backend {
 public:
  Backend(int rank, int size, bool on_caller_stream, bool keeps_status)
      : c10d::Backend(rank, size), on_caller_stream_(on_caller_stream), keeps_status_(keeps_status), uid_(next_uid()++) {
    std::lock_guard<std::mutex> lock(all_mutex());
    all().insert(this);
  }
  ~Backend() override {
    std::lock_guard<std::mutex> lock(all_mutex());
    all().erase(this);
  }

  std::atomic<int64_t> op_ns{1'000'000};  // how long each op takes on the device
  uint64_t uid() const { return uid_; }

  // --- the watchdog's work, for all groups: see the top of the file ---
  static void tick() {
    std::lock_guard<std::mutex> lock(all_mutex());
    for (Backend* backend : all()) backend->look();
  }
  // Forget the work of all groups. Their numbers go on.
  static void forget_all() {
    std::lock_guard<std::mutex> lock(all_mutex());
    for (Backend* backend : all()) {
      std::lock_guard<std::mutex> list(backend->list_mutex_);
      backend->outstanding_.clear();
      for (auto& [key, communicator] : backend->communicators_) communicator->busy = 0;
    }
  }
  static std::string status_json(bool entries) {
    machine().note_on_host(entries ? "readEntries" : "readStatus");
    std::lock_guard<std::mutex> lock(all_mutex());
    std::string json = "{\"version\": \"2.10\", \"pg_config\": {}, \"pg_status\": {";
    bool first = true;
    for (const auto& [uid, status] : statuses()) {
      json += std::string(first ? "" : ", ") + "\"" + std::to_string(uid) + "\": {" +
              field("last_enqueued_collective", status->lastEnqueuedSeq) + ", " +
              field("last_started_collective", status->lastStartedSeq) + ", " +
              field("last_completed_collective", status->lastCompletedSeq) + "}";
      first = false;
    }
    json += "}";
    if (entries) {
      // The Flight Recorder asks the start and the end event of each Work that is outstanding.
      for (Backend* backend : all()) {
        std::lock_guard<std::mutex> list(backend->list_mutex_);
        for (size_t i = 0; i < 2 * backend->outstanding_.size(); i++) machine().note_unsafe("queryEvent");
      }
      json += ", \"entries\": []";
    }
    return json + "}";
  }
  StreamId stream(int device) { return communicator("", device).own_stream; }
  size_t outstanding() {
    std::lock_guard<std::mutex> lock(list_mutex_);
    return outstanding_.size();
  }

  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void enableCollectivesTiming() override { timing_ = true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    machine().note_on_host("getSequenceNumberForGroup");
    return collectives_;
  }

  void startCoalescing() override { block_.emplace(); }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    const std::optional<Block> block = std::move(block_);
    block_.reset();
    if (!block || !block->communicator) return nullptr;
    const uint64_t seq = block->p2p ? messages_ : collectives_;
    auto work = c10::make_intrusive<Work>(c10d::OpType::COALESCED, seq, timing_);
    launch(*block->communicator, block->stream, *work, {});
    return block->async ? work : nullptr;
  }

  using Tensors = std::vector<at::Tensor>;
  using Issued = c10::intrusive_ptr<c10d::Work>;
  Issued allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return collective(c10d::OpType::ALLREDUCE, tensors[0], tensors, opts.asyncOp);
  }
  Issued allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return collective(c10d::OpType::ALLREDUCE_COALESCED, tensors[0], tensors, opts.asyncOp);
  }
  Issued broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return collective(c10d::OpType::BROADCAST, tensors[0], tensors, opts.asyncOp);
  }
  Issued reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return collective(c10d::OpType::REDUCE, tensors[0], tensors, opts.asyncOp);
  }
  Issued allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return collective(c10d::OpType::ALLGATHER, inputs[0], outputs[0], opts.asyncOp);
  }
  Issued _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    return collective(c10d::OpType::_ALLGATHER_BASE, input, {output}, opts.asyncOp);
  }
  Issued allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return collective(c10d::OpType::COALESCED, inputs[0], outputs, opts.asyncOp);
  }
  Issued reduce_scatter(Tensors& outputs, std::vector<Tensors>&, const c10d::ReduceScatterOptions& opts) override {
    return collective(c10d::OpType::REDUCE_SCATTER, outputs[0], outputs, opts.asyncOp);
  }
  Issued _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    return collective(c10d::OpType::_REDUCE_SCATTER_BASE, input, {output}, opts.asyncOp);
  }
  Issued reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    return collective(c10d::OpType::COALESCED, inputs[0], outputs, opts.asyncOp);
  }
  Issued alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>&, std::vector<int64_t>&,
                     const c10d::AllToAllOptions& opts) override {
    return collective(c10d::OpType::ALLTOALL_BASE, input, {output}, opts.asyncOp);
  }
  Issued alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    return collective(c10d::OpType::ALLTOALL, inputs[0], outputs, opts.asyncOp);
  }
  Issued barrier(const c10d::BarrierOptions& opts) override {
    at::Tensor flag = at::empty({1}, at::TensorOptions().device(opts.device.value_or(Guard::at(machine().device()))));
    return collective(c10d::OpType::BARRIER, flag, {flag}, opts.asyncOp);
  }
  Issued send(Tensors& tensors, int peer, int) override { return message(c10d::OpType::SEND, tensors[0], peer); }
  Issued recv(Tensors& tensors, int peer, int) override { return message(c10d::OpType::RECV, tensors[0], peer); }

 private:
  struct Block {  // between startCoalescing() and endCoalescing()
    Communicator* communicator = nullptr;
    StreamId stream;
    bool p2p = false, async = false;
  };

  // Makes a device current for as long as an op is issued, as NCCL's back end does.
  class OnDevice {
   public:
    explicit OnDevice(int device) : old_(machine().device()) { machine().set_device(device); }
    ~OnDevice() { machine().set_device(old_); }

   private:
    int old_;
  };

  Issued collective(c10d::OpType op, const at::Tensor& tensor, const Tensors& outputs, bool async_op) {
    const int device = tensor.device().index();
    const OnDevice guard(device);
    if (!block_ || !block_->communicator) collectives_++;
    Communicator& used = communicator("", device);
    const bool own = async_op || !on_caller_stream_;
    const StreamId stream = own ? used.own_stream : machine().current(device);
    if (own) join_caller(stream);
    if (block_) {
      block_->communicator = &used;
      block_->stream = stream;
      block_->async = own;
      if (!own) return nullptr;
      // NCCL returns a Work here that never completes; its number is the block's.
      auto work = c10::make_intrusive<Work>(op, collectives_, timing_);
      complete_at_issue(*work, stream, outputs);
      work->end = kNever;
      return work;
    }
    auto work = c10::make_intrusive<Work>(op, collectives_, timing_);
    launch(used, stream, *work, outputs);
    return own ? work : nullptr;
  }

  Issued message(c10d::OpType op, const at::Tensor& tensor, int peer) {
    const int device = tensor.device().index();
    const OnDevice guard(device);
    // A batch uses the group's communicator; an op on its own one that only the two ranks share.
    Communicator& used = communicator(block_ ? "" : "peer " + std::to_string(peer), device);
    if (!block_ || !block_->communicator) messages_++;
    join_caller(used.own_stream);
    machine().note("recordStream");  // so that the tensor's memory is not used again too early
    if (block_) {
      *block_ = {&used, used.own_stream, true, true};
      return nullptr;
    }
    auto work = c10::make_intrusive<Work>(op, messages_, timing_);
    launch(used, used.own_stream, *work, {tensor});
    return work;
  }

  Communicator& communicator(const std::string& peer, int device) {
    std::lock_guard<std::mutex> lock(list_mutex_);
    auto& made = communicators_[{peer, device}];
    if (!made) {
      std::lock_guard<std::recursive_mutex> streams(machine().mutex);
      made = std::make_unique<Communicator>();
      made->own_stream = made->last_stream = {device, machine().from_pool(device)};
    }
    return *made;
  }

  // Let a stream of ours begin after what the caller has put on its own.
  static void join_caller(StreamId stream) {
    const StreamId caller = machine().current(stream.device);
    std::lock_guard<std::recursive_mutex> lock(machine().mutex);
    machine().wait(stream, caller, machine().busy(caller), machine().is_capturing(caller), "input");
  }

  void launch(Communicator& used, StreamId stream, Work& work, const Tensors& outputs) {
    const bool captured = machine().is_capturing(stream);
    {
      std::lock_guard<std::recursive_mutex> lock(machine().mutex);
      if (!captured) machine().wait(stream, used.last_stream, used.busy, false, "communicator");
      std::tie(work.begin, work.end) = machine().put(stream, op_ns);
      if (!captured) {
        used.busy = work.end;
        used.last_stream = stream;
      }
    }
    complete_at_issue(work, stream, outputs);
    work.captured = captured;
    if (captured) return;
    const std::shared_ptr<c10d::ProcessGroupStatus> status = own_status();
    std::lock_guard<std::mutex> lock(list_mutex_);
    outstanding_.push_back({work.seq, work.begin, work.end});
    status->lastEnqueuedSeq = static_cast<int64_t>(work.seq);
  }

  void complete_at_issue(Work& work, StreamId stream, const Tensors& outputs) {
    work.stream = stream;
    work.outputs = outputs;
    const c10::StreamGuard on(Guard::stream_of(stream));
    work.future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                           std::vector<c10::Device>{Guard::at(stream.device)});
    work.future->markCompleted(c10::IValue(outputs));
  }

  // The status is in the list of all from the group's first op on, and stays there. With the Flight
  // Recorder switched off (TORCH_FR_BUFFER_SIZE=0) it cannot be read.
  std::shared_ptr<c10d::ProcessGroupStatus> own_status() {
    std::lock_guard<std::mutex> lock(all_mutex());
    if (!keeps_status_) {
      if (!status_) status_ = std::make_shared<c10d::ProcessGroupStatus>();
      return status_;
    }
    auto& known = statuses()[uid_];
    if (!known) known = std::make_shared<c10d::ProcessGroupStatus>();
    return status_ = known;
  }

  void look() {
    std::lock_guard<std::mutex> lock(list_mutex_);
    const int64_t now = machine().now();
    for (auto work = outstanding_.begin(); work != outstanding_.end();) {
      const auto seq = static_cast<int64_t>(work->seq);
      if (status_->lastStartedSeq < seq && now >= work->begin) status_->lastStartedSeq = seq;
      if (now < work->end) {
        ++work;
        continue;
      }
      status_->lastCompletedSeq = seq;
      work = outstanding_.erase(work);
    }
  }

  static std::string field(const char* name, int64_t value) {
    return std::string("\"") + name + "\": \"" + std::to_string(value) + "\"";
  }
  static std::atomic<uint64_t>& next_uid() {
    static std::atomic<uint64_t> next{0};
    return next;
  }
  static std::mutex& all_mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static std::set<Backend*>& all() {
    static auto* backends = new std::set<Backend*>;
    return *backends;
  }
  static std::map<uint64_t, std::shared_ptr<c10d::ProcessGroupStatus>>& statuses() {
    static auto* known = new std::map<uint64_t, std::shared_ptr<c10d::ProcessGroupStatus>>;
    return *known;
  }

  struct Outstanding {
    uint64_t seq;
    int64_t begin, end;
  };

  const bool on_caller_stream_;
  const bool keeps_status_;
  const uint64_t uid_;
  std::atomic<bool> timing_{false};
  uint64_t collectives_ = 0, messages_ = 0;
  std::optional<Block> block_;
  std::mutex list_mutex_;  // taken after all_mutex()
  std::map<std::pair<std::string, int>, std::unique_ptr<Communicator>> communicators_;
  std::list<Outstanding> outstanding_;
  std::shared_ptr<c10d::ProcessGroupStatus> status_;
};

}  // namespace simulated
