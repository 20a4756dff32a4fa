// Whether a process of this machine still runs.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <string>

namespace rankcall {

// The state letter in proc(5)'s stat, of which `fd` is an open file; 0 if the process has ended.
// The process may end at any time, also between opening the file and reading it.
inline char state_letter(int fd) {
  char text[512];  // the name, which is the only long field before the state, has at most 64 bytes
  const ssize_t size = read(fd, text, sizeof text);
  if (size <= 0) return 0;
  const std::string stat(text, std::size_t(size));
  const auto name_end = stat.rfind(')');
  return name_end == std::string::npos || name_end + 2 >= stat.size() ? 0 : stat[name_end + 2];
}

// False if it is not known.
inline bool has_ended(int pid) {
  const int fd = open(("/proc/" + std::to_string(pid) + "/stat").c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return errno == ENOENT || errno == ESRCH;
  const char state = state_letter(fd);
  close(fd);
  return state == 0 || state == 'Z' || state == 'X';
}

}  // namespace rankcall
