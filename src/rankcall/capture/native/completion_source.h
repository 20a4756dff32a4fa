// Have an op's end recorded: by its future, by the return of its Work's wait(), or on a device by
// what the back end says it has completed.
#pragma once

#include <atomic>
#include <cstring>
#include <typeinfo>

#include "completion.h"
#include "work_proxy.h"

namespace rankcall {
namespace {

// Types of Work without a future or a number. To find out throws, which costs 6 to 16 us, so it is done once.
class Kinds {
 public:
  bool has(const std::type_info& type) const {
    for (const auto& slot : types_) {
      const std::type_info* known = slot.load(std::memory_order_acquire);
      if (!known) return false;
      if (known == &type) return true;
    }
    return false;
  }
  void add(const std::type_info& type) {
    for (auto& slot : types_) {
      const std::type_info* expected = nullptr;
      if (slot.compare_exchange_strong(expected, &type) || expected == &type) return;
    }
  }

 private:
  std::atomic<const std::type_info*> types_[32] = {};
};
Kinds g_without_future, g_without_result, g_without_number;

// Whether a Work was made in Python. Its caller gets that very object, which may have any attributes.
bool is_python_work(const std::type_info& type) { return std::strstr(type.name(), "PyWork") != nullptr; }

int64_t last_number(c10d::Backend& back_end) {
  static std::atomic<bool> can_tell{true};
  if (!can_tell.load(std::memory_order_relaxed)) return DeviceOp::kNoNumber;
  try {
    return static_cast<int64_t>(back_end.getSequenceNumberForGroup());
  } catch (const std::exception&) {
    can_tell = false;  // to throw takes long
    return DeviceOp::kNoNumber;
  }
}

// The number that the back end gave an op: its Work's. NCCL returns no Work from a synchronous
// collective or inside a coalescing block; the back end's own counter then has the number of its last
// collective. If another thread issues one on the same group meanwhile, that is one too high, and the
// op is found to have completed a little late. Batched sends and receives have none.
int64_t number_of(c10d::Work* work, const Issued& issued) {
  if (work && !g_without_number.has(typeid(*work))) {
    try {
      return static_cast<int64_t>(work->getSequencenumber());
    } catch (const std::exception&) {
      g_without_number.add(typeid(*work));
    }
  }
  return issued.p2p ? DeviceOp::kNoNumber : issued.back_end ? last_number(*issued.back_end) : DeviceOp::kNoNumber;
}

// The future that a back end's watchdog completes once it has found that an op is over on its device.
// It holds no tensor. Null if there is none. ProcessGroupNCCL never completes that of a collective in
// a coalescing block: the back end's status then tells. The op's other future would have the outputs, and is
// complete, for a stream, as soon as the op is enqueued.
c10::intrusive_ptr<c10::ivalue::Future> result_of(c10d::Work* work) {
  if (!work) return nullptr;
  const std::type_info& type = typeid(*work);
  if (g_without_result.has(type) || is_python_work(type)) return nullptr;
  try {
    return work->getFutureResult();
  } catch (const std::exception&) {
    g_without_result.add(type);
    return nullptr;
  }
}

// Have an op's record ended by that future. An op that failed, or was aborted, stays in flight: it
// never completed, and that is what a diagnosis needs.
void await_result(const Issued& issued, const c10::intrusive_ptr<c10::ivalue::Future>& result) {
  result->addCallback(
      [recorder = issued.recorder, index = issued.index](c10::ivalue::Future& done) {
        constexpr int64_t kSuccess = 0;  // c10d::WorkResult::SUCCESS
        if (done.hasError() || !done.constValue().isInt() || done.constValue().toInt() != kSuccess) return;
        if (!recorder->is_inherited() && recorder->device_ops.claim_by_future(index))
          end_record(*recorder, index, Outcome{layout::kCompleted, now_ns()});
      },
      /*uses_future=*/false);
}

// A number that no other stream has; 0 if the stream is not known. Streams of a pool have small ids, and
// those that were made elsewhere have an address for one. The default stream has 0.
uint64_t stream_number(const std::optional<c10::Stream>& stream) {
  return stream ? (static_cast<uint64_t>(stream->id()) << 8 | (stream->device_index() & 0x7f)) + 1 : 0;
}

// On a device: have the op's record ended by its Work's future, and note the op for
// capture/device_status.py. An op that is captured into a graph does not run now, and its end cannot
// be seen.
void note_device_op(c10d::Work* work, torch::jit::Stack& stack, Issued& issued) {
  Recorder& recorder = *issued.recorder;
  const auto result = issued.captured ? nullptr : result_of(work);
  const int64_t number = number_of(work, issued);
  const bool in_stream = !work && issued.is_synchronous;
  if (work && issued.span) {
    auto inner = c10::intrusive_ptr<c10d::Work>::unsafe_reclaim_from_nonowning(work);
    stack.back() = c10::IValue(c10::intrusive_ptr<c10d::Work>(
        c10::make_intrusive<TimedWork>(std::move(inner), issued.recorder, std::move(issued.span))));
  } else if (issued.span) {
    recorder.device_times.end(std::move(issued.span));  // synchronous: the caller's stream stands behind it already
  }
  // The note comes first: whoever takes the ends, and then the notes, has a note of each end.
  const DeviceOp noted_op{issued.index, issued.group, number,       issued.p2p, issued.block,
                          result != nullptr, stream_number(issued.stream), in_stream};
  const bool noted = !issued.captured && recorder.device_ops.add(noted_op);
  if (!noted) abandon(recorder, issued.index, layout::kEnqueued);
  else if (result) await_result(issued, result);
}

void await_future(const Issued& issued, const c10::intrusive_ptr<c10::ivalue::Future>& future) {
  Recorder* recorder = issued.recorder;
  if (future->completed()) {
    end_record(*recorder, issued.index, outcome_of(*recorder, *future));
    return;
  }
  // Without uses_future: with it, a stream of torch's pool would wait for the op, and every output
  // would be recorded on that stream. Two words of capture: std::function keeps them without
  // allocating.
  future->addCallback(
      [recorder, index = issued.index](c10::ivalue::Future& done) {
        end_record(*recorder, index, outcome_of(*recorder, done));
      },
      /*uses_future=*/false);
}

// Arrange for the end to be recorded, after the op has been issued.
void arrange_completion(const Op& op, torch::jit::Stack& stack, Issued& issued) {
  c10d::Work* work = nullptr;
  if (op.returns_work && stack.back().isObject()) work = held<c10d::Work>(stack.back());
  if (issued.on_device) {
    note_device_op(work, stack, issued);
    return;
  }
  if (!work) {  // monitored_barrier_ has returned, so it is over
    end_record(*issued.recorder, issued.index, Outcome{layout::kCompleted, now_ns()});
    return;
  }
  const std::type_info& type = typeid(*work);
  if (!g_without_future.has(type)) {
    c10::intrusive_ptr<c10::ivalue::Future> future;
    try {
      future = work->getFuture();
    } catch (const std::exception&) {
    }
    if (future) {
      await_future(issued, future);
      return;
    }
    // Works made in Python are all of one type here, and some have a future.
    if (!is_python_work(type)) g_without_future.add(type);
  }
  if (is_python_work(type)) {
    abandon(*issued.recorder, issued.index);
    return;
  }
  auto inner = c10::intrusive_ptr<c10d::Work>::unsafe_reclaim_from_nonowning(work);
  stack.back() =
      c10::IValue(c10::intrusive_ptr<c10d::Work>(c10::make_intrusive<WaitedWork>(std::move(inner), std::move(issued))));
}

}  // namespace
}  // namespace rankcall
