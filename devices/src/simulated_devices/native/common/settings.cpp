#include "settings.h"

#include <stdarg.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

namespace simulated {
namespace {

std::string text(const char* name, const char* fallback) {
  const char* value = getenv(name);
  return value && *value ? value : fallback;
}

double number(const char* name, double fallback) {
  const char* value = getenv(name);
  if (!value || !*value) return fallback;
  char* end = nullptr;
  double parsed = strtod(value, &end);
  return end == value ? fallback : parsed;
}

Settings read() {
  Settings s;
  s.devices = static_cast<int>(number("SIMULATED_DEVICES", 2));
  // Device ordinals index fixed arrays, and no machine of today has more GPUs than that.
  if (s.devices < 0) s.devices = 0;
  if (s.devices > 64) s.devices = 64;
  s.memory = static_cast<size_t>(number("SIMULATED_DEVICES_MEMORY", 8.0 * (1ull << 30)));
  s.faults = text("SIMULATED_DEVICES_FAULTS", "");
  s.shared = text("SIMULATED_DEVICES_SHM", "/dev/shm");
  s.aten = text("SIMULATED_DEVICES_ATEN", "");
  s.kernel_us = number("SIMULATED_DEVICES_KERNEL_US", 0);
  s.link_gbs = number("SIMULATED_DEVICES_LINK_GBS", 0);
  s.init_timeout_s = number("SIMULATED_DEVICES_INIT_TIMEOUT", 1800);
  s.peer_death_is_error = text("SIMULATED_DEVICES_PEER_DEATH", "hang") == "error";
  s.trace = number("SIMULATED_DEVICES_TRACE", 0) != 0;
  s.rank = static_cast<int>(number("RANK", 0));
  return s;
}

void write_line(const char* format, va_list arguments) {
  // One write, so that the lines of several ranks do not mix.
  char line[1024];
  int used = snprintf(line, sizeof line, "[simulated devices, rank %d, pid %d] ", settings().rank, getpid());
  int more = vsnprintf(line + used, sizeof line - used - 1, format, arguments);
  size_t size = used + (more < 0 ? 0 : more);
  if (size > sizeof line - 2) size = sizeof line - 2;
  line[size++] = '\n';
  ssize_t ignored = ::write(2, line, size);
  (void)ignored;
}

}  // namespace

const Settings& settings() {
  static const Settings* all = new Settings(read());  // never destroyed: threads outlive static destructors
  return *all;
}

void say(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  write_line(format, arguments);
  va_end(arguments);
}

void say_once(const char* name, const char* format, ...) {
  static std::mutex* guard = new std::mutex;
  static auto* seen = new std::set<std::string>;
  {
    std::lock_guard<std::mutex> hold(*guard);
    if (!seen->insert(name).second) return;
  }
  va_list arguments;
  va_start(arguments, format);
  write_line(format, arguments);
  va_end(arguments);
}

}  // namespace simulated
