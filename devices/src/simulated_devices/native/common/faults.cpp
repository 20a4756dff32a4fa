#include "faults.h"

#include <poll.h>
#include <pthread.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

#include "../abi/cuda.h"
#include "settings.h"

namespace simulated {
namespace {

std::atomic<bool> some_fault{false};  // so that a healthy device pays one relaxed load per op

const std::map<std::string, Fault::Kind>& kinds() {
  static const auto* table = new std::map<std::string, Fault::Kind>{
      {"stall", Fault::Stall}, {"slow", Fault::Slow}, {"link", Fault::Link},       {"xid", Fault::Xid},
      {"ecc", Fault::Ecc},     {"oom", Fault::Oom},   {"network", Fault::Network}, {"init", Fault::Init}};
  return *table;
}

void set(Fault& fault, const std::string& key, const std::string& value) {
  if (key == "rank") fault.rank = atoi(value.c_str());
  else if (key == "device") fault.device = atoi(value.c_str());
  else if (key == "peer") fault.peer = atoi(value.c_str());
  else if (key == "from_op") fault.from_op = atoll(value.c_str());
  else if (key == "factor") fault.factor = atof(value.c_str());
  else if (key == "code") fault.code = atoi(value.c_str());
  else if (key == "bytes") fault.bytes = atoll(value.c_str());
  else if (key == "scope") fault.every_op = value == "all";
  else say_once(("fault key " + key).c_str(), "the fault file has an unknown key '%s'; it is ignored", key.c_str());
}

std::vector<Fault> parse(const std::string& text) {
  std::vector<Fault> faults;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string id, kind, word;
    if (!(words >> id >> kind) || id[0] == '#') continue;
    auto known = kinds().find(kind);
    if (known == kinds().end()) {
      say_once(("fault " + kind).c_str(), "the fault file orders an unknown fault '%s'; it is ignored", kind.c_str());
      continue;
    }
    Fault fault;
    fault.kind = known->second;
    while (words >> word) {
      size_t equals = word.find('=');
      if (equals != std::string::npos) set(fault, word.substr(0, equals), word.substr(equals + 1));
    }
    faults.push_back(fault);
  }
  return faults;
}

int xid_of(const Fault& fault) { return fault.kind == Fault::Ecc ? 48 : fault.code; }

}  // namespace

FaultBoard& FaultBoard::get() {
  static auto* board = new FaultBoard;
  return *board;
}

std::shared_ptr<const FaultBoard::Faults> FaultBoard::current() const { return std::atomic_load(&faults_); }

bool FaultBoard::reload() {
  if (settings().faults.empty()) return false;
  std::lock_guard<std::mutex> hold(reading_);
  std::ifstream file(settings().faults + "/faults");
  std::stringstream content;
  if (file) content << file.rdbuf();
  if (content.str() == read_text_) return false;
  read_text_ = content.str();
  auto fresh = std::make_shared<const Faults>(parse(read_text_));
  some_fault = !fresh->empty();
  std::atomic_store(&faults_, std::shared_ptr<const Faults>(fresh));
  return true;
}

void FaultBoard::follow(std::function<void()> changed) {
  if (settings().faults.empty() || followed_) return;
  followed_ = true;
  reload();  // faults that were ordered before the job began strike its first op
  std::thread(&FaultBoard::run, this, std::move(changed)).detach();
}

void FaultBoard::run(std::function<void()> changed) {
  pthread_setname_np(pthread_self(), "sim-faults");
  if (some_fault) changed();
  int notices = inotify_init1(IN_CLOEXEC);
  inotify_add_watch(notices, settings().faults.c_str(), IN_MOVED_TO | IN_CLOSE_WRITE | IN_DELETE);
  for (;;) {
    // Notices do not cross the hosts of a network file system, hence the look at least every 200 ms.
    pollfd waiting{notices, POLLIN, 0};
    char drained[4096];
    if (poll(&waiting, 1, 200) > 0 && read(notices, drained, sizeof drained) < 0) usleep(200000);
    if (reload()) changed();
  }
}

const Fault* FaultBoard::find(const Faults& faults, Fault::Kind kind, int device, int64_t op) const {
  for (const Fault& fault : faults) {
    bool mine = (fault.rank < 0 || fault.rank == settings().rank) && (fault.device < 0 || fault.device == device);
    if (fault.kind == kind && mine && op >= fault.from_op) return &fault;
  }
  return nullptr;
}

bool FaultBoard::any(Fault::Kind kind, int device, int64_t op) const {
  return some_fault.load(std::memory_order_relaxed) && find(*current(), kind, device, op);
}

bool FaultBoard::stalls_nccl(int device, int64_t op) const { return any(Fault::Stall, device, op); }
bool FaultBoard::breaks_network(int device, int64_t op) const { return any(Fault::Network, device, op); }
bool FaultBoard::stalls_init() const { return any(Fault::Init, -1, 0); }

bool FaultBoard::stalls_everything(int device) const {
  if (!some_fault.load(std::memory_order_relaxed)) return false;
  auto faults = current();
  const Fault* fault = find(*faults, Fault::Stall, device);
  return fault && fault->every_op;
}

double FaultBoard::slowness(int device) const {
  if (!some_fault.load(std::memory_order_relaxed)) return 1;
  auto faults = current();
  const Fault* fault = find(*faults, Fault::Slow, device);
  return fault && fault->factor > 1 ? fault->factor : 1;
}

bool FaultBoard::stalls_link(int rank, int peer) const {
  if (!some_fault.load(std::memory_order_relaxed)) return false;
  auto is = [](int wanted, int actual) { return wanted < 0 || wanted == actual; };
  for (const Fault& fault : *current()) {
    bool this_way = is(fault.rank, rank) && is(fault.peer, peer),
         other_way = is(fault.rank, peer) && is(fault.peer, rank);
    if (fault.kind == Fault::Link && (this_way || other_way)) return true;
  }
  return false;
}

bool FaultBoard::lost(int device, int* cuda_error, int* xid) const {
  if (!some_fault.load(std::memory_order_relaxed)) return false;
  auto faults = current();
  const Fault* fault = find(*faults, Fault::Xid, device);
  if (!fault) fault = find(*faults, Fault::Ecc, device);
  if (!fault) return false;
  *xid = xid_of(*fault);
  // 48 and 94 are ECC errors, 74 is NVLink, 13 and 31 are the program's own accesses. After all others,
  // 79 among them, the device answers nothing.
  *cuda_error = *xid == 48 || *xid == 94   ? cudaErrorECCUncorrectable
                : *xid == 74               ? cudaErrorNvlinkUncorrectable
                : *xid == 31 || *xid == 13 ? cudaErrorIllegalAddress
                                           : cudaErrorUnknown;
  return true;
}

int FaultBoard::xid_on_this_host(int device) const {
  for (const Fault& fault : *current()) {
    int on = fault.device >= 0                       ? fault.device
             : fault.rank >= 0 && settings().devices ? fault.rank % settings().devices
                                                     : device;
    if ((fault.kind == Fault::Xid || fault.kind == Fault::Ecc) && on == device) return xid_of(fault);
  }
  return 0;
}

int64_t FaultBoard::memory_limit(int device, int64_t memory) const {
  if (!some_fault.load(std::memory_order_relaxed)) return memory;
  auto faults = current();
  const Fault* fault = find(*faults, Fault::Oom, device);
  return fault && fault->bytes < memory ? fault->bytes : memory;
}

}  // namespace simulated
