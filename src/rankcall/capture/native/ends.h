// Record that an op has ended, and how.
#pragma once

#include "recorder.h"

namespace rankcall {
namespace {

void finish(Recorder& recorder, uint64_t index, const Outcome& outcome) noexcept {
  recorder.ring.finish(index, outcome);
  wake(1);
}

Outcome failure(Recorder& recorder, const char* message) noexcept {
  Outcome outcome{layout::kFailed, now_ns()};
  try {
    outcome.error = recorder.ring.error(message);
  } catch (...) {
  }
  return outcome;
}

// The end of an op whose Work tells it. On a device that end is still to come: its event is watched.
void ended(Recorder& recorder, uint64_t index, DeviceTimes::Span* span, const Outcome& outcome) noexcept {
  if (span && recorder.devices.end(span, outcome)) recorder.device_busy();
  else finish(recorder, index, outcome);
}

Outcome outcome_of(Recorder& recorder, c10::ivalue::Future& future) noexcept {
  if (!future.hasError()) return Outcome{layout::kCompleted, now_ns()};
  try {
    return failure(recorder, future.tryRetrieveErrorMessage().c_str());
  } catch (...) {
    return failure(recorder, "unknown error");
  }
}

}  // namespace
}  // namespace rankcall
