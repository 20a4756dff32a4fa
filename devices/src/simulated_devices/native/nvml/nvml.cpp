// libnvidia-ml.so.1: what torch and monitoring tools ask about a device, and the Xids that were ordered.
//
// A monitor is usually no rank of the job. Therefore a fault that names only a rank is taken for one of
// the device with which that rank starts, its number modulo the devices of the machine.
#include <time.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../abi/cuda.h"
#include "../common/faults.h"
#include "../common/settings.h"

using namespace simulated;

namespace {

constexpr int SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TIMEOUT = 10, LOST = 15;
constexpr unsigned long long EVENT_XID = 8;
constexpr unsigned char FABRIC_NOT_SUPPORTED = 0;

struct Memory {
  unsigned long long total, free, used;
};
struct Utilization {
  unsigned gpu, memory;
};
struct Event {
  void* device;
  unsigned long long type, data;
  unsigned gpu_instance, compute_instance;
};
struct PciInfo {
  char legacy[16];
  unsigned domain, bus, device, ids, subsystem;
  char id[32];
};
// What all versions of the struct begin with.
struct FabricInfo {
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state;
};

void* handle_of(int device) { return reinterpret_cast<void*>(static_cast<long>(device + 1)); }
int device_of(void* handle) { return static_cast<int>(reinterpret_cast<long>(handle)) - 1; }
bool valid(void* handle) { return device_of(handle) >= 0 && device_of(handle) < settings().devices; }

int xid_of(void* handle) {
  FaultBoard::get().refresh();
  return FaultBoard::get().xid_on_this_host(device_of(handle));
}
bool lost(void* handle) { return xid_of(handle) == 79; }

// The bytes that the runtime and the driver give, as text.
void write_uuid(int device, char* out, unsigned size) {
  snprintf(out, size, "GPU-73696d75-6c61-7465-642d-6465766963%02x", device);
}

// The device that each set of events has reported already, so that one Xid is one event.
struct EventSet {
  int reported[64] = {};
};

}  // namespace

#define DEVICE_OR_RETURN(handle)               \
  if (!valid(handle)) return INVALID_ARGUMENT; \
  if (lost(handle)) return LOST

CUDA_API int nvmlInit_v2() { return SUCCESS; }
CUDA_API int nvmlInit() { return SUCCESS; }  // torch counts devices with it, before it touches CUDA
CUDA_API int nvmlInitWithFlags(unsigned) { return SUCCESS; }
CUDA_API int nvmlShutdown() { return SUCCESS; }
CUDA_API const char* nvmlErrorString(int error) {
  switch (error) {
    case SUCCESS: return "The operation was successful";
    case INVALID_ARGUMENT: return "A supplied argument is invalid";
    case NOT_SUPPORTED: return "The requested operation is not available on target device";
    case NOT_FOUND: return "A query to find an object was unsuccessful";
    case TIMEOUT: return "User provided timeout passed";
    case LOST: return "The GPU has fallen off the bus or has otherwise become inaccessible";
    default: return "Unknown Error";
  }
}
CUDA_API int nvmlSystemGetDriverVersion(char* out, unsigned size) {
  snprintf(out, size, "simulated");
  return SUCCESS;
}
CUDA_API int nvmlSystemGetCudaDriverVersion_v2(int* out) {
  *out = SIMULATED_CUDA_VERSION;
  return SUCCESS;
}
CUDA_API int nvmlSystemGetCudaDriverVersion(int* out) { return nvmlSystemGetCudaDriverVersion_v2(out); }
CUDA_API int nvmlDeviceGetCount_v2(unsigned* out) {
  *out = settings().devices;
  return SUCCESS;
}
CUDA_API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** out) {
  if (index >= static_cast<unsigned>(settings().devices)) return INVALID_ARGUMENT;
  *out = handle_of(index);
  return lost(*out) ? LOST : SUCCESS;
}
CUDA_API int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** out) {
  unsigned domain = 0, bus = 0;
  if (sscanf(id, "%x:%x", &domain, &bus) != 2 || bus < 1 || bus > static_cast<unsigned>(settings().devices))
    return NOT_FOUND;
  *out = handle_of(bus - 1);
  return SUCCESS;
}
CUDA_API int nvmlDeviceGetHandleByUUID(const char* uuid, void** out) {
  char own[64];
  for (int device = 0; device < settings().devices; ++device) {
    write_uuid(device, own, sizeof own);
    if (strcmp(uuid, own)) continue;
    *out = handle_of(device);
    return lost(*out) ? LOST : SUCCESS;
  }
  return NOT_FOUND;
}
CUDA_API int nvmlDeviceGetIndex(void* handle, unsigned* out) {
  if (!valid(handle)) return INVALID_ARGUMENT;
  *out = device_of(handle);
  return SUCCESS;
}
CUDA_API int nvmlDeviceGetName(void* handle, char* out, unsigned size) {
  DEVICE_OR_RETURN(handle);
  snprintf(out, size, "Simulated device");
  return SUCCESS;
}
CUDA_API int nvmlDeviceGetUUID(void* handle, char* out, unsigned size) {
  DEVICE_OR_RETURN(handle);
  write_uuid(device_of(handle), out, size);
  return SUCCESS;
}
CUDA_API int nvmlDeviceGetPciInfo_v3(void* handle, PciInfo* out) {
  DEVICE_OR_RETURN(handle);
  memset(out, 0, sizeof *out);
  out->bus = device_of(handle) + 1;
  snprintf(out->legacy, sizeof out->legacy, "0000:%02x:00.0", out->bus);
  snprintf(out->id, sizeof out->id, "00000000:%02x:00.0", out->bus);
  return SUCCESS;
}
CUDA_API int nvmlDeviceGetMemoryInfo(void* handle, Memory* out) {
  DEVICE_OR_RETURN(handle);
  *out = {settings().memory, settings().memory, 0};  // what other processes have allocated is not known here
  return SUCCESS;
}
CUDA_API int nvmlDeviceGetUtilizationRates(void* handle, Utilization* out) {
  DEVICE_OR_RETURN(handle);
  *out = {0, 0};
  return SUCCESS;
}
CUDA_API int nvmlDeviceGetComputeRunningProcesses(void* handle, unsigned* count, void*) {
  DEVICE_OR_RETURN(handle);
  *count = 0;
  return SUCCESS;
}
CUDA_API int nvmlDeviceGetComputeRunningProcesses_v3(void* handle, unsigned* count, void* out) {
  return nvmlDeviceGetComputeRunningProcesses(handle, count, out);
}
CUDA_API int nvmlDeviceGetTotalEccErrors(void* handle, int kind, int, unsigned long long* out) {
  DEVICE_OR_RETURN(handle);
  constexpr int UNCORRECTED = 1;
  int xid = xid_of(handle);
  *out = kind == UNCORRECTED && (xid == 48 || xid == 94);
  return SUCCESS;
}
CUDA_API int nvmlDeviceGetEccMode(void* handle, unsigned* current, unsigned* pending) {
  DEVICE_OR_RETURN(handle);
  *current = *pending = 1;
  return SUCCESS;
}

// --- Events: a monitor waits for Xids ---

CUDA_API int nvmlEventSetCreate(EventSet** out) {
  *out = new EventSet;
  return SUCCESS;
}
CUDA_API int nvmlEventSetFree(EventSet* set) {
  delete set;
  return SUCCESS;
}
CUDA_API int nvmlDeviceGetSupportedEventTypes(void* handle, unsigned long long* out) {
  if (!valid(handle)) return INVALID_ARGUMENT;
  *out = EVENT_XID;
  return SUCCESS;
}
CUDA_API int nvmlDeviceRegisterEvents(void* handle, unsigned long long, EventSet*) {
  return valid(handle) ? SUCCESS : INVALID_ARGUMENT;
}
CUDA_API int nvmlEventSetWait_v2(EventSet* set, Event* out, unsigned timeout_ms) {
  for (unsigned waited = 0;; waited += 10) {
    for (int device = 0; device < settings().devices && device < 64; ++device) {
      int xid = xid_of(handle_of(device));
      bool fresh = xid && xid != set->reported[device];
      set->reported[device] = xid;
      if (!fresh) continue;
      *out = {handle_of(device), EVENT_XID, static_cast<unsigned long long>(xid), ~0u, ~0u};
      return SUCCESS;
    }
    if (waited >= timeout_ms) return TIMEOUT;
    timespec nap{0, 10'000'000};
    nanosleep(&nap, nullptr);
  }
}
CUDA_API int nvmlEventSetWait(EventSet* set, Event* out, unsigned timeout_ms) {
  return nvmlEventSetWait_v2(set, out, timeout_ms);
}

// --- How devices are connected: each reaches the others' memory, by no NVLink ---

CUDA_API int nvmlDeviceGetP2PStatus(void*, void*, int, int* out) {
  *out = 0;  // NVML_P2P_STATUS_OK
  return SUCCESS;
}
CUDA_API int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, void*) { return NOT_SUPPORTED; }
CUDA_API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NOT_SUPPORTED; }
// torch 2.13 takes another answer than SUCCESS for an error. That there is no fabric is a state.
CUDA_API int nvmlDeviceGetGpuFabricInfoV(void* handle, FabricInfo* out) {
  DEVICE_OR_RETURN(handle);
  *out = {out->version, {}, SUCCESS, 0, FABRIC_NOT_SUPPORTED};
  return SUCCESS;
}
