// Capture, graphs and user objects.
#include "api.h"

namespace simulated {
namespace {

GraphHandle* of(cudaGraph_t handle) { return reinterpret_cast<GraphHandle*>(handle); }
GraphHandle* of(cudaGraphExec_t handle) { return reinterpret_cast<GraphHandle*>(handle); }

// An object of the user that lives until the last graph that owns it is gone.
struct UserObject {
  void* object;
  cudaHostFn_t destroy;
  std::atomic<unsigned> references;
  void release(unsigned count) {
    if (references.fetch_sub(count) != count) return;
    destroy(object);
    delete this;
  }
};

cudaError_t capture_info(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                         cudaGraph_t* graph, size_t* dependencies) {
  STREAM_OR_RETURN(stream, handle);
  std::lock_guard<std::mutex> hold(Engine::get().lock());
  Capture* capture = stream->capture.get();
  *status = !capture           ? cudaStreamCaptureStatusNone
            : capture->invalid ? cudaStreamCaptureStatusInvalidated
                               : cudaStreamCaptureStatusActive;
  if (capture && id) *id = capture->id;
  if (capture && graph) *graph = reinterpret_cast<cudaGraph_t>(&capture->handle);
  if (dependencies) *dependencies = 0;
  return cudaSuccess;
}

}  // namespace

Graph::~Graph() {
  for (auto& destructor : destructors) destructor();
}

}  // namespace simulated

using namespace simulated;

CUDA_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_capture_mode);
  return cudaSuccess;
}
CUDA_API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  RETURN_STANDING_ERROR();
  STREAM_OR_RETURN(stream, handle);
  return set_error(begin_capture(stream, mode, nullptr));
}
CUDA_API cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t handle, cudaGraph_t graph, const cudaGraphNode_t*,
                                                   const void*, size_t, cudaStreamCaptureMode mode) {
  RETURN_STANDING_ERROR();
  STREAM_OR_RETURN(stream, handle);
  return set_error(begin_capture(stream, mode, of(graph)->graph));
}
CUDA_API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* out) {
  *out = nullptr;
  STREAM_OR_RETURN(stream, handle);
  std::shared_ptr<Graph> graph;
  RETURN_ON_ERROR(end_capture(stream, &graph));
  *out = reinterpret_cast<cudaGraph_t>(new GraphHandle{graph});
  return cudaSuccess;
}
CUDA_API cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  return capture_info(handle, status, nullptr, nullptr, nullptr);
}
#if SIMULATED_CUDA_MAJOR < 13
CUDA_API cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                                 unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t**,
                                                 size_t* dependencies) {
  return capture_info(stream, status, id, graph, dependencies);
}
CUDA_API cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                                 unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t**,
                                                 const void**, size_t* dependencies) {
  return capture_info(stream, status, id, graph, dependencies);
}
#else
CUDA_API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                              unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                                              const void** edges, size_t* dependencies) {
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  return capture_info(stream, status, id, graph, dependencies);
}
#endif
CUDA_API cudaError_t cudaGraphCreate(cudaGraph_t* out, unsigned) {
  *out = reinterpret_cast<cudaGraph_t>(new GraphHandle{std::make_shared<Graph>()});
  return cudaSuccess;
}
CUDA_API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long) {
  *out = reinterpret_cast<cudaGraphExec_t>(new GraphHandle{of(graph)->graph});
  return cudaSuccess;
}
CUDA_API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(out, graph, flags);
}
CUDA_API cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
CUDA_API cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t handle) {
  RETURN_STANDING_ERROR();
  STREAM_OR_RETURN(stream, handle);
  for (const Operation& operation : of(graph)->graph->operations)
    RETURN_ON_ERROR(Engine::get().enqueue(stream, operation));
  return cudaSuccess;
}
CUDA_API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = of(graph)->graph->operations.size();
  return cudaSuccess;
}
CUDA_API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete of(graph);
  return cudaSuccess;
}
CUDA_API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete of(graph);
  return cudaSuccess;
}
CUDA_API cudaError_t cudaUserObjectCreate(cudaUserObject_t* out, void* object, cudaHostFn_t destroy,
                                          unsigned references, unsigned) {
  *out = reinterpret_cast<cudaUserObject_t>(new UserObject{object, destroy, {references}});
  return cudaSuccess;
}
CUDA_API cudaError_t cudaUserObjectRelease(cudaUserObject_t handle, unsigned count) {
  reinterpret_cast<UserObject*>(handle)->release(count);
  return cudaSuccess;
}
CUDA_API cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t handle, unsigned count,
                                               unsigned flags) {
  auto* object = reinterpret_cast<UserObject*>(handle);
  constexpr unsigned MOVE = 1;  // the caller's references become the graph's
  if (!(flags & MOVE)) object->references += count;
  of(graph)->graph->destructors.push_back([=] { object->release(count); });
  return cudaSuccess;
}
