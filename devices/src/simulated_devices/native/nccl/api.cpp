// NCCL's functions: handles, groups and the making of communicators.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>
#include <thread>

#include "../common/settings.h"
#include "../runtime/bridge.h"
#include "communicator.h"
#include "reduce.h"

#define NCCL_API extern "C" __attribute__((visibility("default")))

// The runtime's, with which this library is linked.
extern "C" cudaError_t cudaGetDevice(int*);
extern "C" cudaError_t cudaSetDevice(int);
extern "C" cudaError_t cudaMalloc(void**, size_t);
extern "C" cudaError_t cudaFree(void*);

// What an ncclComm_t points to.
struct ncclComm {
  simulated::CommunicatorPtr communicator;
  std::thread maker;                    // of a non-blocking communicator
  std::atomic<int> state{ncclSuccess};  // ncclInProgress while it is made, or why that failed
};

namespace simulated {
namespace {

// --- Handles. A handle that was destroyed is refused instead of being followed. ---

struct Handles {
  std::mutex lock;
  std::set<ncclComm*> all;
};
Handles& handles() {
  static auto* own = new Handles;
  return *own;
}

CommunicatorPtr of(ncclComm_t handle) {
  std::lock_guard<std::mutex> hold(handles().lock);
  return handles().all.count(handle) ? handle->communicator : nullptr;
}

ncclComm* publish(CommunicatorPtr communicator) {
  auto* handle = new ncclComm;
  handle->communicator = std::move(communicator);
  std::lock_guard<std::mutex> hold(handles().lock);
  handles().all.insert(handle);
  return handle;
}

void retire(ncclComm* handle) {
  {
    std::lock_guard<std::mutex> hold(handles().lock);
    handles().all.erase(handle);
  }
  if (handle->maker.joinable()) handle->maker.join();
  delete handle;
}

ncclResult_t refuse(ncclResult_t result, const char* why) {
  set_last_error(why);
  return result;
}
constexpr const char* NO_COMMUNICATOR = "the communicator is null or was destroyed";

#define COMMUNICATOR_OR_RETURN(name, handle) \
  CommunicatorPtr name = of(handle);         \
  if (!name) return refuse(ncclInvalidArgument, NO_COMMUNICATOR)

// --- Groups: per thread, until the outermost one ends. ---

struct Batch {
  CommunicatorPtr communicator;
  cudaStream_t stream;
  std::vector<Task> tasks;
};
thread_local int group_depth = 0;
thread_local std::vector<Batch> batches;
thread_local std::vector<CommunicatorPtr> to_meet;  // communicators that were made in the group

ncclResult_t end_group() {
  ncclResult_t result = ncclSuccess;
  auto joining = std::move(to_meet);
  to_meet.clear();
  for (auto& communicator : joining)
    if (ncclResult_t met = communicator->meet()) result = met;
  auto all = std::move(batches);
  batches.clear();
  for (Batch& batch : all)
    if (ncclResult_t launched = batch.communicator->launch(batch.communicator, batch.stream, std::move(batch.tasks)))
      result = launched;
  return result;
}

ncclResult_t submit(ncclComm_t handle, cudaStream_t stream, const Task& task) {
  COMMUNICATOR_OR_RETURN(communicator, handle);
  if (communicator->aborted || communicator->revoked)
    return refuse(ncclInvalidUsage, "the communicator was aborted or revoked");
  if (!size_of(task.type)) return refuse(ncclInvalidArgument, "there is no such data type");
  if (task.root < 0 || task.root >= communicator->size)
    return refuse(ncclInvalidArgument, "the root or peer is no rank of the communicator");
  PreMultiply ignored;
  if (task.op < 0 || (task.op >= ncclNumOps && !communicator->find_operator(task.op, &ignored)))
    return refuse(ncclInvalidArgument, "there is no such reduction");
  auto same = std::find_if(batches.begin(), batches.end(),
                           [&](Batch& batch) { return batch.communicator == communicator && batch.stream == stream; });
  if (same != batches.end()) same->tasks.push_back(task);
  else batches.push_back({communicator, stream, {task}});
  return group_depth ? ncclSuccess : end_group();
}

Task collective(Task::Kind kind, const void* in, void* out, size_t count, ncclDataType_t type, int op = ncclSum,
                int root = 0) {
  return {kind, static_cast<const char*>(in), static_cast<char*>(out), count, type, op, root};
}

// --- Making communicators ---

std::string hex(const char* bytes, size_t size) {
  std::string text;
  char two[3];
  for (size_t i = 0; i < size; ++i) {
    snprintf(two, sizeof two, "%02x", static_cast<unsigned char>(bytes[i]));
    text += two;
  }
  return text;
}

// A name of fixed length for a communicator that was derived from others.
std::string digest(const std::string& text) {
  uint64_t first = 14695981039346656037ull, second = 88172645463325252ull;
  for (unsigned char byte : text) {
    first = (first ^ byte) * 1099511628211ull;
    second = (second + byte + 1) * 6364136223846793005ull;
    second ^= second >> 29;
  }
  char out[33];
  snprintf(out, sizeof out, "%016lx%016lx", static_cast<unsigned long>(first), static_cast<unsigned long>(second));
  return out;
}

bool wants_blocking(const ncclConfig_t* config, bool inherited) {
  if (!config || config->magic != NCCL_API_MAGIC || config->blocking == NCCL_CONFIG_UNDEF_INT) return inherited;
  return config->blocking != 0;
}

// Runs what makes a communicator: here, or for a non-blocking one in a thread of its own.
ncclResult_t make(ncclComm_t* out, const CommunicatorPtr& communicator, std::function<ncclResult_t()> steps) {
  if (communicator->blocking) {
    ncclResult_t result = steps();
    *out = result == ncclSuccess ? publish(communicator) : nullptr;
    return result;
  }
  ncclComm* handle = publish(communicator);
  handle->state = ncclInProgress;
  *out = handle;
  handle->maker = std::thread([handle, steps = std::move(steps), device = communicator->device] {
    cudaSetDevice(device);
    handle->state = steps();
  });
  return ncclInProgress;
}

ncclResult_t initialise(ncclComm_t* out, const std::string& id, int size, int rank, const ncclConfig_t* config,
                        bool inherited = true) {
  if (!out || size < 1 || rank < 0 || rank >= size)
    return refuse(ncclInvalidArgument, "the rank or the number of ranks makes no sense");
  int device = 0;
  if (cudaGetDevice(&device) || cudaSetDevice(device))
    return refuse(ncclUnhandledCudaError, "the CUDA device cannot be used");
  auto communicator = std::make_shared<Communicator>(id, size, rank, device, wants_blocking(config, inherited));
  const bool in_group = group_depth > 0 && communicator->blocking;
  return make(out, communicator, [communicator, in_group] {
    if (ncclResult_t attached = communicator->attach()) return attached;
    if (!in_group) return communicator->meet();
    to_meet.push_back(communicator);  // the other ranks may be made by this very thread
    return ncclSuccess;
  });
}

std::string name_of(const ncclUniqueId& id) { return hex(id.internal, 16); }

}  // namespace
}  // namespace simulated

using namespace simulated;

NCCL_API ncclResult_t ncclGetVersion(int* out) {
  *out = SIMULATED_NCCL_VERSION;
  return ncclSuccess;
}
NCCL_API const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError: return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    case ncclTimeout: return "NCCL operation timed out";
  }
  return "unknown result code";
}
NCCL_API const char* ncclGetLastError(ncclComm_t) {
  static thread_local std::string text;
  text = last_error();
  return text.c_str();
}
NCCL_API ncclResult_t ncclGetUniqueId(ncclUniqueId* out) {
  std::random_device random;
  memset(out, 0, sizeof *out);
  for (int i = 0; i < 4; ++i) {
    uint32_t word = random();
    memcpy(out->internal + 4 * i, &word, sizeof word);
  }
  return ncclSuccess;
}
NCCL_API ncclResult_t ncclCommInitRank(ncclComm_t* out, int size, ncclUniqueId id, int rank) {
  return initialise(out, name_of(id), size, rank, nullptr);
}
NCCL_API ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int size, ncclUniqueId id, int rank,
                                             ncclConfig_t* config) {
  return initialise(out, name_of(id), size, rank, config);
}
NCCL_API ncclResult_t ncclCommInitRankScalable(ncclComm_t* out, int size, int rank, int, ncclUniqueId* ids,
                                               ncclConfig_t* config) {
  return initialise(out, name_of(ids[0]), size, rank, config);
}
NCCL_API ncclResult_t ncclCommInitAll(ncclComm_t* out, int count, const int* devices) {
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  int before = 0;
  cudaGetDevice(&before);
  ++group_depth;
  ncclResult_t result = ncclSuccess;
  for (int rank = 0; rank < count && result == ncclSuccess; ++rank) {
    if (cudaSetDevice(devices ? devices[rank] : rank)) result = ncclUnhandledCudaError;
    else result = initialise(&out[rank], name_of(id), count, rank, nullptr);
  }
  cudaSetDevice(before);
  --group_depth;
  ncclResult_t met = end_group();
  return result ? result : met;
}
NCCL_API ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* out, ncclConfig_t* config) {
  COMMUNICATOR_OR_RETURN(parent, handle);
  // The group's number is taken now, so that the ranks' numbers agree also if the splits run in threads.
  const std::string name = parent->child_name("split " + std::to_string(color));
  std::vector<std::pair<int64_t, int64_t>> all;
  if (ncclResult_t agreed = parent->agree(color, key, &all))
    return refuse(agreed, "the parent communicator was aborted");
  *out = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::vector<std::pair<int64_t, int>> members;
  for (int rank = 0; rank < parent->size; ++rank)
    if (all[rank].first == color) members.push_back({all[rank].second, rank});
  std::sort(members.begin(), members.end());
  int rank = 0;
  while (members[rank].second != parent->rank) ++rank;
  return initialise(out, digest(name), static_cast<int>(members.size()), rank, config, parent->blocking);
}
NCCL_API ncclResult_t ncclCommShrink(ncclComm_t handle, int* excluded, int count, ncclComm_t* out, ncclConfig_t* config,
                                     int flags) {
  COMMUNICATOR_OR_RETURN(parent, handle);
  if (flags & NCCL_SHRINK_ABORT) parent->abort();
  std::vector<int> gone(excluded, excluded + count);
  std::sort(gone.begin(), gone.end());
  std::string what = "shrink";
  int rank = parent->rank;
  for (int other : gone) {
    what += " " + std::to_string(other);
    rank -= other < parent->rank;
  }
  if (std::count(gone.begin(), gone.end(), parent->rank))
    return refuse(ncclInvalidArgument, "a rank that is excluded must not call ncclCommShrink");
  return initialise(out, digest(parent->child_name(what)), parent->size - count, rank, config, parent->blocking);
}
NCCL_API ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  COMMUNICATOR_OR_RETURN(communicator, handle);
  if (communicator->revoked) return refuse(ncclInvalidUsage, "a communicator that was revoked cannot be finalised");
  if (communicator->blocking) communicator->drain();
  return ncclSuccess;
}
NCCL_API ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  if (!handle) return ncclSuccess;
  COMMUNICATOR_OR_RETURN(communicator, handle);
  communicator->drain();  // NCCL, too, waits for what was launched: a hung collective hangs its destruction
  retire(handle);
  return ncclSuccess;
}
NCCL_API ncclResult_t ncclCommAbort(ncclComm_t handle) {
  if (!handle) return ncclSuccess;
  COMMUNICATOR_OR_RETURN(communicator, handle);
  communicator->abort();
  retire(handle);
  return ncclSuccess;
}
NCCL_API ncclResult_t ncclCommRevoke(ncclComm_t handle, int flags) {
  COMMUNICATOR_OR_RETURN(communicator, handle);
  if (flags) return refuse(ncclInvalidArgument, "there are no flags");
  communicator->revoke();
  return ncclSuccess;
}
NCCL_API ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* out) {
  COMMUNICATOR_OR_RETURN(communicator, handle);
  int state = handle->state;
  *out = static_cast<ncclResult_t>(state != ncclSuccess ? state : communicator->error.load());
  return ncclSuccess;
}
NCCL_API ncclResult_t ncclCommCount(const ncclComm_t handle, int* out) {
  COMMUNICATOR_OR_RETURN(communicator, handle);
  *out = communicator->size;
  return ncclSuccess;
}
NCCL_API ncclResult_t ncclCommUserRank(const ncclComm_t handle, int* out) {
  COMMUNICATOR_OR_RETURN(communicator, handle);
  *out = communicator->rank;
  return ncclSuccess;
}
NCCL_API ncclResult_t ncclCommCuDevice(const ncclComm_t handle, int* out) {
  COMMUNICATOR_OR_RETURN(communicator, handle);
  *out = communicator->device;
  return ncclSuccess;
}
// Memory needs no registration here: every copy goes through the shared file.
NCCL_API ncclResult_t ncclCommRegister(const ncclComm_t, void* buffer, size_t, void** out) {
  *out = buffer;
  return ncclSuccess;
}
NCCL_API ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
NCCL_API ncclResult_t ncclCommSuspend(ncclComm_t, int) { return ncclSuccess; }
NCCL_API ncclResult_t ncclCommResume(ncclComm_t) { return ncclSuccess; }
NCCL_API ncclResult_t ncclCommMemStats(ncclComm_t, int, uint64_t* out) {
  *out = 0;
  return ncclSuccess;
}
NCCL_API ncclResult_t ncclMemAlloc(void** out, size_t size) {
  return cudaMalloc(out, size) ? ncclUnhandledCudaError : ncclSuccess;
}
NCCL_API ncclResult_t ncclMemFree(void* pointer) { return cudaFree(pointer) ? ncclUnhandledCudaError : ncclSuccess; }

NCCL_API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* out, void* value, ncclDataType_t type,
                                               ncclScalarResidence_t residence, ncclComm_t handle) {
  COMMUNICATOR_OR_RETURN(communicator, handle);
  if (!size_of(type) || !value) return refuse(ncclInvalidArgument, "there is no such data type, or no scalar");
  PreMultiply op{type, 0, nullptr};
  if (residence == ncclScalarHostImmediate) op.value = scalar(type, value);
  else op.device_scalar = value;
  *out = communicator->add_operator(op);
  return ncclSuccess;
}
NCCL_API ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t handle) {
  COMMUNICATOR_OR_RETURN(communicator, handle);
  communicator->remove_operator(op);
  return ncclSuccess;
}

NCCL_API ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}
NCCL_API ncclResult_t ncclGroupEnd() {
  if (!group_depth) return refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  return --group_depth ? ncclSuccess : end_group();
}

NCCL_API ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                    ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, stream, collective(Task::AllReduce, in, out, count, type, op));
}
NCCL_API ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root,
                                    ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, stream, collective(Task::Broadcast, in, out, count, type, ncclSum, root));
}
NCCL_API ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                                cudaStream_t stream) {
  return submit(comm, stream, collective(Task::Broadcast, buffer, buffer, count, type, ncclSum, root));
}
NCCL_API ncclResult_t ncclReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                                 ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, stream, collective(Task::Reduce, in, out, count, type, op, root));
}
NCCL_API ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t comm,
                                    cudaStream_t stream) {
  return submit(comm, stream, collective(Task::AllGather, in, out, count, type));
}
NCCL_API ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                        ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, stream, collective(Task::ReduceScatter, in, out, count, type, op));
}
NCCL_API ncclResult_t ncclAlltoAll(const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t comm,
                                   cudaStream_t stream) {
  return submit(comm, stream, collective(Task::AllToAll, in, out, count, type));
}
NCCL_API ncclResult_t ncclGather(const void* in, void* out, size_t count, ncclDataType_t type, int root,
                                 ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, stream, collective(Task::Gather, in, out, count, type, ncclSum, root));
}
NCCL_API ncclResult_t ncclScatter(const void* in, void* out, size_t count, ncclDataType_t type, int root,
                                  ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, stream, collective(Task::Scatter, in, out, count, type, ncclSum, root));
}
NCCL_API ncclResult_t ncclSend(const void* in, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                               cudaStream_t stream) {
  return submit(comm, stream, collective(Task::Send, in, nullptr, count, type, ncclSum, peer));
}
NCCL_API ncclResult_t ncclRecv(void* out, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                               cudaStream_t stream) {
  return submit(comm, stream, collective(Task::Recv, nullptr, out, count, type, ncclSum, peer));
}
