// An NVTX tool, in place of a profiler. It writes each event to $NVTX_COLLECTED.<pid>.
//
// Each line has a letter (D domain, M mark, B range begin, E range end), the thread's id and the text.
#include <fcntl.h>
#include <nvtx3/nvToolsExt.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <string>

namespace {

int g_file = -1;
std::atomic<uint64_t> g_ranges{0};
int g_domain = 0;  // its address is the handle

void say(char kind, const std::string& text) {
  const std::string line = std::string(1, kind) + " " + std::to_string(syscall(SYS_gettid)) + " " + text + "\n";
  if (write(g_file, line.data(), line.size()) < 0) abort();
}

nvtxDomainHandle_t NVTX_API create(const char* name) {
  say('D', name);
  return reinterpret_cast<nvtxDomainHandle_t>(&g_domain);
}

void check(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  if (domain != reinterpret_cast<nvtxDomainHandle_t>(&g_domain)) abort();
  if (event && event->messageType != NVTX_MESSAGE_TYPE_ASCII) abort();
}

void NVTX_API mark(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  check(domain, event);
  say('M', event->message.ascii);
}

nvtxRangeId_t NVTX_API begin(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  check(domain, event);
  const uint64_t range = ++g_ranges;
  say('B', std::to_string(range) + " " + event->message.ascii);
  return range;
}

void NVTX_API end(nvtxDomainHandle_t domain, nvtxRangeId_t range) {
  check(domain, nullptr);
  say('E', std::to_string(range));
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get) {
  const std::string path = std::string(getenv("NVTX_COLLECTED")) + "." + std::to_string(getpid());
  g_file = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  const auto* tables = static_cast<const NvtxExportTableCallbacks*>(get(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (g_file < 0 || !tables || !tables->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) return 0;
  *table[NVTX_CBID_CORE2_DomainCreateA] = reinterpret_cast<NvtxFunctionPointer>(create);
  *table[NVTX_CBID_CORE2_DomainMarkEx] = reinterpret_cast<NvtxFunctionPointer>(mark);
  *table[NVTX_CBID_CORE2_DomainRangeStartEx] = reinterpret_cast<NvtxFunctionPointer>(begin);
  *table[NVTX_CBID_CORE2_DomainRangeEnd] = reinterpret_cast<NvtxFunctionPointer>(end);
  return 1;
}
