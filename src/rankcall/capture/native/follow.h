// Have an op's end recorded: by its future, or where its Work has none by the return of wait().
#pragma once

#include <atomic>
#include <typeinfo>

#include "ends.h"
#include "waited.h"

namespace rankcall {
namespace {

// Kinds of Work whose getFuture() throws, which costs 6 to 16 us each time: asked once.
class Futureless {
 public:
  bool knows(const std::type_info& type) const {
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
Futureless g_futureless;

void follow_future(const Issued& issued, const c10::intrusive_ptr<c10::ivalue::Future>& future) {
  Recorder* recorder = issued.recorder;
  if (issued.span) {
    // With uses_future the callback runs on streams that wait for the op, so the event it records
    // comes after the op's end.
    future->addCallback([recorder, span = issued.span](c10::ivalue::Future& done) {
      ended(*recorder, span->index, span, outcome_of(*recorder, done));
    });
  } else if (future->completed()) {
    finish(*recorder, issued.index, outcome_of(*recorder, *future));
  } else {
    // Two words of capture: std::function keeps them without allocating.
    future->addCallback(
        [recorder, index = issued.index](c10::ivalue::Future& done) {
          finish(*recorder, index, outcome_of(*recorder, done));
        },
        /*uses_future=*/false);
  }
}

// Arrange for the end to be recorded, after the op has been issued.
void follow(const Op& op, torch::jit::Stack& stack, const Issued& issued) {
  Recorder& recorder = *issued.recorder;
  c10d::Work* work = nullptr;
  if (op.returns_work && stack.back().isObject()) work = held<c10d::Work>(stack.back());
  if (!work) {  // monitored_barrier_, and what a back end merges into a later launch
    ended(recorder, issued.index, issued.span, Outcome{layout::kCompleted, now_ns()});
    return;
  }
  const std::type_info& type = typeid(*work);
  if (!g_futureless.knows(type)) {
    c10::intrusive_ptr<c10::ivalue::Future> future;
    try {
      future = work->getFuture();
    } catch (const std::exception&) {
    }
    if (future) {
      follow_future(issued, future);
      return;
    }
    g_futureless.add(type);
  }
  auto inner = c10::intrusive_ptr<c10d::Work>::unsafe_reclaim_from_nonowning(work);
  stack.back() = c10::IValue(c10::intrusive_ptr<c10d::Work>(c10::make_intrusive<WaitedWork>(std::move(inner), issued)));
}

}  // namespace
}  // namespace rankcall
