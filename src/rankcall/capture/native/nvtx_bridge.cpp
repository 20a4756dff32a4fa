// The three NVTX calls that the recorder makes, behind plain C functions; see capture/interface.py.
//
// Built on its own, against NVTX's header-only library. Without a tool NVTX makes no domain.
#include <nvtx3/nvToolsExt.h>

namespace {

nvtxDomainHandle_t g_domain = nullptr;

nvtxEventAttributes_t attributes(const char* text) {
  nvtxEventAttributes_t event{};
  event.version = NVTX_VERSION;
  event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  event.messageType = NVTX_MESSAGE_TYPE_ASCII;
  event.message.ascii = text;
  return event;
}

}  // namespace

extern "C" {

// Make the domain; returns whether a tool is attached. Call with the GIL, before the others.
int rankcall_nvtx_open(const char* domain) {
  if (!g_domain) g_domain = nvtxDomainCreateA(domain);
  return g_domain != nullptr;
}

void rankcall_nvtx_mark(const char* text) {
  const auto event = attributes(text);
  nvtxDomainMarkEx(g_domain, &event);
}

unsigned long long rankcall_nvtx_begin(const char* text) {
  const auto event = attributes(text);
  return nvtxDomainRangeStartEx(g_domain, &event);
}

void rankcall_nvtx_end(unsigned long long range) { nvtxDomainRangeEnd(g_domain, range); }

}
