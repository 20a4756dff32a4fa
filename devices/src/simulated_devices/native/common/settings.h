// What the environment says. `devices exec` sets these variables; see environment.py for their meaning.
#pragma once
#include <string>

namespace simulated {

struct Settings {
  int devices;            // SIMULATED_DEVICES: GPUs of this machine
  size_t memory;          // SIMULATED_DEVICES_MEMORY: bytes of each GPU
  std::string faults;     // SIMULATED_DEVICES_FAULTS: the folder in which faults are ordered, or empty
  std::string shared;     // SIMULATED_DEVICES_SHM: the folder of NCCL's shared files
  std::string aten;       // SIMULATED_DEVICES_ATEN: the library that computes aten ops, or empty
  double kernel_us;       // SIMULATED_DEVICES_KERNEL_US: the least time a kernel takes
  double link_gbs;        // SIMULATED_DEVICES_LINK_GBS: bandwidth of NCCL's links, 0 for unlimited
  double init_timeout_s;  // SIMULATED_DEVICES_INIT_TIMEOUT: how long ncclCommInit waits for the other ranks
  bool
      peer_death_is_error;  // SIMULATED_DEVICES_PEER_DEATH=error: a dead peer raises ncclRemoteError, as over a network
  bool trace;               // SIMULATED_DEVICES_TRACE=1: name what is not simulated and each error on stderr
  int rank;                 // RANK, as torchrun sets it, else 0; faults are ordered by it
};

const Settings& settings();

// Writes one line to stderr with a prefix that names this library and the process.
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));
// The same, at most once per `name` and process.
void say_once(const char* name, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace simulated
