// Record that an op has ended, and how.
#pragma once

#include "recorder.h"

namespace rankcall {
namespace {

void end_record(Recorder& recorder, uint64_t index, const Outcome& outcome) noexcept {
  if (recorder.is_inherited()) return;  // a forked child drops its copies of the parent's Works
  recorder.ring.finish(index, outcome);
  wake(1);
}

// End a record whose op may go on, because its end will not be known.
void abandon(Recorder& recorder, uint64_t index, uint8_t status = layout::kStarted) noexcept {
  Outcome outcome{status, 0};
  outcome.abandoned = true;
  end_record(recorder, index, outcome);
}

Outcome failure(Recorder& recorder, const char* message) noexcept {
  Outcome outcome{layout::kFailed, now_ns()};
  try {
    outcome.error = recorder.ring.error(message);
  } catch (...) {
  }
  return outcome;
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
