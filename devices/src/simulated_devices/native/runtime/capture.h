// Stream capture and graphs.
//
// A graph here is the list of its operations in the order in which they were captured, which is one of
// the orders that its dependencies allow. Its branches therefore run one after the other. What can be
// asked about the dependencies themselves is kept: a stream that was forked into the capture and was not
// joined again makes the capture fail, as CUDA documents.
#pragma once
#include <pthread.h>

#include <map>
#include <memory>
#include <vector>

#include "engine.h"

namespace simulated {

struct Graph {
  std::vector<Operation> operations;
  std::vector<std::function<void()>> destructors;  // of the user objects that the graph owns
  ~Graph();
};

// What a cudaGraph_t and a cudaGraphExec_t point to. An executable graph keeps the graph's operations.
struct GraphHandle {
  std::shared_ptr<Graph> graph;
};

// How much of each stream's captured work something has seen.
using Seen = std::map<Stream*, uint64_t>;

struct Capture {
  GraphHandle handle;  // of its graph; whoever asks for it may use it until the capture ends
  uint64_t id = 0;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  pthread_t owner;
  StreamPtr origin;
  bool invalid = false;
  std::map<StreamPtr, Seen> members;

  cudaError_t add(const StreamPtr& stream, Operation operation);  // under the engine's lock
  bool joined() const;
};

// What an event that was recorded in a capturing stream stands for.
struct CapturedPoint {
  std::weak_ptr<Capture> capture;
  Seen seen;
};

extern thread_local cudaStreamCaptureMode thread_capture_mode;

// Whether the calling thread may make a call that no capture can hold, for example cudaMalloc. If not,
// the captures that forbid it become invalid. Takes the engine's lock.
cudaError_t check_unsafe_call(const char* name);
// The same for a wait or a query of one stream, which is forbidden if that stream captures.
cudaError_t check_not_capturing(const StreamPtr& stream, const char* name);
bool captures_allow_legacy_work(int device);  // under the engine's lock

cudaError_t begin_capture(const StreamPtr& stream, cudaStreamCaptureMode mode, std::shared_ptr<Graph> into);
cudaError_t end_capture(const StreamPtr& stream, std::shared_ptr<Graph>* out);
// Under the engine's lock: `stream` waits for a point of a capture and so becomes part of it.
cudaError_t join_capture(const StreamPtr& stream, const CapturedPoint& point);

}  // namespace simulated
