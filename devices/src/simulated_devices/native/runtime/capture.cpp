#include "capture.h"

#include <algorithm>
#include <set>

#include "../common/settings.h"

namespace simulated {

thread_local cudaStreamCaptureMode thread_capture_mode = cudaStreamCaptureModeGlobal;

namespace {

std::set<Capture*>& active() {  // guarded by the engine's lock
  static auto* all = new std::set<Capture*>;
  return *all;
}

std::atomic<uint64_t> next_capture{1};

}  // namespace

cudaError_t Capture::add(const StreamPtr& stream, Operation operation) {
  if (invalid) return cudaErrorStreamCaptureInvalidated;
  auto& seen = members[stream];
  ++seen[stream.get()];
  operation.attempt = nullptr;  // an attempt remembers how far it came; a graph runs many times
  handle.graph->operations.push_back(std::move(operation));
  return cudaSuccess;
}

bool Capture::joined() const {
  const Seen& end = members.at(origin);
  for (auto& [stream, seen] : members) {
    auto own = seen.find(stream.get());
    auto known = end.find(stream.get());
    if (own != seen.end() && (known == end.end() || known->second < own->second)) return false;
  }
  return true;
}

cudaError_t check_unsafe_call(const char* name) {
  if (thread_capture_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  std::lock_guard<std::mutex> hold(Engine::get().lock());
  cudaError_t result = cudaSuccess;
  for (Capture* capture : active()) {
    if (capture->mode == cudaStreamCaptureModeRelaxed) continue;
    bool own = pthread_equal(capture->owner, pthread_self());
    bool global = capture->mode == cudaStreamCaptureModeGlobal && thread_capture_mode == cudaStreamCaptureModeGlobal;
    if (!own && !global) continue;
    capture->invalid = true;
    result = cudaErrorStreamCaptureUnsupported;
    if (settings().trace) say("%s while a stream is capturing: the capture is invalid now", name);
  }
  return result;
}

cudaError_t check_not_capturing(const StreamPtr& stream, const char* name) {
  {
    std::lock_guard<std::mutex> hold(Engine::get().lock());
    if (stream->capture) {
      stream->capture->invalid = true;
      return cudaErrorStreamCaptureUnsupported;
    }
  }
  return check_unsafe_call(name);
}

bool captures_allow_legacy_work(int device) {
  for (Capture* capture : active())
    for (auto& [stream, seen] : capture->members)
      if (stream->device == device && stream->blocking() && capture->mode != cudaStreamCaptureModeRelaxed) {
        capture->invalid = true;
        return false;
      }
  return true;
}

cudaError_t begin_capture(const StreamPtr& stream, cudaStreamCaptureMode mode, std::shared_ptr<Graph> into) {
  if (stream->role == Stream::Legacy) return cudaErrorStreamCaptureUnsupported;
  std::lock_guard<std::mutex> hold(Engine::get().lock());
  if (stream->capture) return cudaErrorIllegalState;
  auto capture = std::make_shared<Capture>();
  capture->handle.graph = into ? into : std::make_shared<Graph>();
  capture->id = next_capture++;
  capture->mode = mode;
  capture->owner = pthread_self();
  capture->origin = stream;
  capture->members[stream];
  stream->capture = capture;
  active().insert(capture.get());
  return cudaSuccess;
}

cudaError_t end_capture(const StreamPtr& stream, std::shared_ptr<Graph>* out) {
  std::shared_ptr<Capture> capture;  // it goes after the lock: its graph's user objects may call CUDA
  std::lock_guard<std::mutex> hold(Engine::get().lock());
  capture = stream->capture;
  if (!capture) return cudaErrorIllegalState;
  if (capture->origin != stream) return cudaErrorStreamCaptureUnmatched;
  bool same_thread = pthread_equal(capture->owner, pthread_self());
  if (capture->mode != cudaStreamCaptureModeRelaxed && !same_thread) return cudaErrorStreamCaptureWrongThread;
  bool joined = capture->joined();
  for (auto& [member, seen] : capture->members) member->capture = nullptr;
  active().erase(capture.get());
  if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
  if (!joined) return cudaErrorStreamCaptureUnjoined;
  *out = capture->handle.graph;
  return cudaSuccess;
}

cudaError_t join_capture(const StreamPtr& stream, const CapturedPoint& point) {
  std::shared_ptr<Capture> capture = point.capture.lock();
  if (!capture) return cudaErrorStreamCaptureIsolation;
  if (stream->capture && stream->capture != capture) {
    stream->capture->invalid = capture->invalid = true;
    return cudaErrorStreamCaptureMerge;
  }
  if (stream->role == Stream::Legacy) {
    capture->invalid = true;
    return cudaErrorStreamCaptureImplicit;
  }
  stream->capture = capture;
  Seen& seen = capture->members[stream];
  for (auto& [other, number] : point.seen) seen[other] = std::max(seen[other], number);
  return cudaSuccess;
}

}  // namespace simulated
