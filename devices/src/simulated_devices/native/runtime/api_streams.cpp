// Streams, host functions and events.
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "api.h"

namespace simulated {

// An event that other processes can open. Its recordings are counted in a page that all of them map.
struct SharedEvent {
  struct Page {
    std::atomic<uint64_t> recorded, ended;
  };
  Page* page = nullptr;
  int file = -1;  // of the process that made it
  bool imported = false;

  bool ended(uint64_t recording) const { return page->ended.load() >= recording; }
  ~SharedEvent() {
    if (page) munmap(page, sizeof(Page));
    if (file >= 0) close(file);
  }
};

struct Event {
  unsigned flags = 0;
  int device = 0;
  std::shared_ptr<SharedEvent> shared;
  // Both are guarded by the engine's lock. At most one is set.
  RecordingPtr recording;
  std::shared_ptr<CapturedPoint> captured;
};

namespace {

Event* of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

cudaError_t create_stream(cudaStream_t* out, unsigned flags, int priority) {
  RETURN_STANDING_ERROR();
  if (flags > cudaStreamNonBlocking) return set_error(cudaErrorInvalidValue);
  Engine& engine = Engine::get();
  engine.make_context(current_device);
  *out =
      reinterpret_cast<cudaStream_t>(engine.create(current_device, flags, std::max(-5, std::min(0, priority))).get());
  return cudaSuccess;
}

// What a handle of an event holds.
struct ExportedEvent {
  int pid, file;
};

cudaError_t map(SharedEvent* event, int file) {
  void* page = mmap(nullptr, sizeof(SharedEvent::Page), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (page == MAP_FAILED) return cudaErrorInvalidResourceHandle;
  event->page = static_cast<SharedEvent::Page*>(page);
  return cudaSuccess;
}

// Another process says when its recording ends, and cannot wake this one: the page is looked at.
void wait_for(const SharedEvent& event, uint64_t recording, int device) {
  while (!event.ended(recording) && Engine::get().device(device).sticky == cudaSuccess) {
    timespec nap{0, 100'000};
    nanosleep(&nap, nullptr);
  }
}

cudaError_t record(cudaEvent_t handle, cudaStream_t stream_handle, unsigned flags) {
  RETURN_STANDING_ERROR();
  STREAM_OR_RETURN(stream, stream_handle);
  Event* event = of(handle);
  if (!event || event->device != stream->device) return set_error(cudaErrorInvalidResourceHandle);
  Engine& engine = Engine::get();
  auto recording = std::make_shared<Recording>();
  Operation operation;
  operation.kind = Operation::Mark;
  operation.recording = recording;
  if (event->shared) {
    uint64_t number = ++event->shared->page->recorded;
    operation.run = [shared = event->shared, number] { shared->page->ended = number; };
  }
  {
    std::lock_guard<std::mutex> hold(engine.lock());
    if (stream->capture && !(flags & cudaEventRecordExternal)) {
      // It stands for a place in the graph, and nothing will ever be recorded.
      auto point = std::make_shared<CapturedPoint>();
      point->capture = stream->capture;
      point->seen = stream->capture->members[stream];
      event->captured = point;
      event->recording = nullptr;
      return cudaSuccess;
    }
    recording->point = {stream, stream->enqueued + 1};
    event->captured = nullptr;
    event->recording = recording;
  }
  return set_error(engine.enqueue(stream, std::move(operation)));
}

cudaError_t wait(cudaStream_t stream_handle, cudaEvent_t handle) {
  RETURN_STANDING_ERROR();
  STREAM_OR_RETURN(stream, stream_handle);
  Engine& engine = Engine::get();
  Event* event = of(handle);
  if (!event) return set_error(cudaErrorInvalidResourceHandle);
  Operation operation;
  operation.kind = Operation::Mark;
  if (event->shared && event->shared->imported) {
    uint64_t recording = event->shared->page->recorded;
    if (event->shared->ended(recording)) return cudaSuccess;
    operation.kind = Operation::Host;
    operation.may_block = true;
    operation.run = [shared = event->shared, recording, device = stream->device] {
      wait_for(*shared, recording, device);
    };
    return set_error(engine.enqueue(stream, std::move(operation)));
  }
  {
    std::lock_guard<std::mutex> hold(engine.lock());
    if (event->captured) return set_error(join_capture(stream, *event->captured));
    if (!event->recording || event->recording->point.reached()) return cudaSuccess;
    if (stream->capture) {
      stream->capture->invalid = true;
      return set_error(cudaErrorStreamCaptureIsolation);
    }
    operation.after.push_back(event->recording->point);
  }
  return set_error(engine.enqueue(stream, std::move(operation)));
}

cudaError_t enqueue_host(cudaStream_t handle, std::function<void()> function) {
  RETURN_STANDING_ERROR();
  STREAM_OR_RETURN(stream, handle);
  Engine::get().make_context(stream->device);
  Operation operation;
  operation.kind = Operation::Host;
  operation.may_block = true;
  operation.run = std::move(function);
  return set_error(Engine::get().enqueue(stream, std::move(operation)));
}

}  // namespace
}  // namespace simulated

using namespace simulated;

CUDA_API cudaError_t cudaStreamCreate(cudaStream_t* out) { return create_stream(out, 0, 0); }
CUDA_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
  return create_stream(out, flags, 0);
}
CUDA_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  return create_stream(out, flags, priority);
}
CUDA_API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  RETURN_STANDING_ERROR();
  STREAM_OR_RETURN(stream, handle);
  if (stream->role != Stream::Created) return set_error(cudaErrorInvalidResourceHandle);
  Engine::get().destroy(stream);
  return cudaSuccess;
}
CUDA_API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* out) {
  STREAM_OR_RETURN(stream, handle);
  *out = stream->priority;
  return cudaSuccess;
}
CUDA_API cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* out) {
  STREAM_OR_RETURN(stream, handle);
  *out = stream->flags;
  return cudaSuccess;
}
CUDA_API cudaError_t cudaStreamGetId(cudaStream_t handle, unsigned long long* out) {
  STREAM_OR_RETURN(stream, handle);
  *out = stream->id;
  return cudaSuccess;
}
CUDA_API cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* out) {
  STREAM_OR_RETURN(stream, handle);
  *out = stream->device;
  return cudaSuccess;
}
CUDA_API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  RETURN_STANDING_ERROR();
  STREAM_OR_RETURN(stream, handle);
  RETURN_ON_ERROR(check_not_capturing(stream, __func__));
  return Engine::get().idle(stream) ? cudaSuccess : set_error(cudaErrorNotReady);
}
CUDA_API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  RETURN_STANDING_ERROR();
  STREAM_OR_RETURN(stream, handle);
  RETURN_ON_ERROR(check_not_capturing(stream, __func__));
  Engine::get().synchronize(stream);
  RETURN_STANDING_ERROR();
  return cudaSuccess;
}
CUDA_API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return wait(stream, event);
}
CUDA_API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return enqueue_host(stream, [=] { function(data); });
}
CUDA_API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  return enqueue_host(stream, [=] { function(stream, cudaSuccess, data); });
}

// --- Events ---

CUDA_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  RETURN_STANDING_ERROR();
  Engine::get().make_context(current_device);
  auto* event = new Event;
  event->flags = flags;
  event->device = current_device;
  if (flags & cudaEventInterprocess) {
    if (!(flags & cudaEventDisableTiming)) return set_error(cudaErrorInvalidValue);  // CUDA asks for both
    event->shared = std::make_shared<SharedEvent>();
    event->shared->file = memfd_create("simulated-event", MFD_CLOEXEC);
    if (event->shared->file < 0 || ftruncate(event->shared->file, sizeof(SharedEvent::Page)))
      return set_error(cudaErrorMemoryAllocation);
    RETURN_ON_ERROR(map(event->shared.get(), event->shared->file));
  }
  *out = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}
CUDA_API cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
CUDA_API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete of(event);  // what waits for it holds the recording
  return cudaSuccess;
}
CUDA_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return record(event, stream, 0); }
CUDA_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return record(event, stream, flags);
}
CUDA_API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  RETURN_STANDING_ERROR();
  RETURN_IF_CAPTURED();
  Event* event = of(handle);
  if (!event) return set_error(cudaErrorInvalidResourceHandle);
  if (event->shared && event->shared->imported)
    return event->shared->ended(event->shared->page->recorded) ? cudaSuccess : set_error(cudaErrorNotReady);
  std::lock_guard<std::mutex> hold(Engine::get().lock());
  if (event->captured) return set_error(cudaErrorCapturedEvent);
  return !event->recording || event->recording->point.reached() ? cudaSuccess : set_error(cudaErrorNotReady);
}
CUDA_API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  RETURN_STANDING_ERROR();
  RETURN_IF_CAPTURED();
  Event* event = of(handle);
  if (!event) return set_error(cudaErrorInvalidResourceHandle);
  if (event->shared && event->shared->imported) wait_for(*event->shared, event->shared->page->recorded, event->device);
  RecordingPtr recording;
  {
    std::lock_guard<std::mutex> hold(Engine::get().lock());
    if (event->captured) return set_error(cudaErrorCapturedEvent);
    recording = event->recording;
  }
  if (recording) Engine::get().wait_for(recording->point);
  RETURN_STANDING_ERROR();
  return cudaSuccess;
}
CUDA_API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  RETURN_STANDING_ERROR();
  Event *first = of(start), *last = of(end);
  if (!first || !last) return set_error(cudaErrorInvalidResourceHandle);
  std::lock_guard<std::mutex> hold(Engine::get().lock());
  bool untimed = (first->flags | last->flags) & cudaEventDisableTiming;
  if (untimed || !first->recording || !last->recording) return set_error(cudaErrorInvalidResourceHandle);
  if (!first->recording->point.reached() || !last->recording->point.reached()) return set_error(cudaErrorNotReady);
  *milliseconds = static_cast<float>(last->recording->time_ms - first->recording->time_ms);
  return cudaSuccess;
}
#if SIMULATED_CUDA_MAJOR < 13
CUDA_API cudaError_t cudaEventElapsedTime_v2(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  return cudaEventElapsedTime(milliseconds, start, end);
}
#endif

// --- Events between processes ---

CUDA_API cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* out, cudaEvent_t handle) {
  Event* event = of(handle);
  if (!event || !event->shared || event->shared->imported) return set_error(cudaErrorInvalidResourceHandle);
  ExportedEvent exported{getpid(), event->shared->file};
  memset(out, 0, sizeof *out);
  memcpy(out, &exported, sizeof exported);
  return cudaSuccess;
}
CUDA_API cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* out, cudaIpcEventHandle_t handle) {
  RETURN_STANDING_ERROR();
  ExportedEvent exported;
  memcpy(&exported, &handle, sizeof exported);
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", exported.pid, exported.file);
  int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return set_error(cudaErrorInvalidResourceHandle);
  auto shared = std::make_shared<SharedEvent>();
  shared->imported = true;
  cudaError_t mapped = map(shared.get(), file);
  close(file);
  RETURN_ON_ERROR(mapped);
  auto* event = new Event;
  event->flags = cudaEventDisableTiming | cudaEventInterprocess;
  event->device = current_device;
  event->shared = std::move(shared);
  *out = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}
