// Note the exit status of this process in a file, if it is not 0.
//
// The interpreter does not tell its exit handlers with which status it ends. glibc tells that to a
// handler of its own, which runs after the interpreter has ended. So the handler has copies of all
// that it needs. It only runs at exit(): a process that calls _exit() or dies of a signal notes
// nothing.
#pragma once

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <ctime>

namespace rankcall {
namespace {

struct ExitNote {
  char folder[4096];
  char path[4096];
  char fields[1024];  // JSON: all fields of the note before the two that are known last
  pid_t pid = 0;      // a forked child is another process
};

ExitNote g_exit_note;

#if defined(__GLIBC__)
void append_exit_status(int status, void*) {
  if ((status & 0xff) == 0 || g_exit_note.pid != getpid()) return;
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  char line[1200];
  int length = snprintf(line, sizeof line, "{%s, \"code\": %d, \"epoch_ns\": %lld%09ld}\n", g_exit_note.fields,
                        status & 0xff, static_cast<long long>(now.tv_sec), now.tv_nsec);
  mkdir(g_exit_note.folder, 0700);
  int file = open(g_exit_note.path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file < 0) return;  // the note is lost
  if (write(file, line, static_cast<size_t>(length)) < 0) length = 0;
  close(file);
}
#endif

// Return whether the status will be noted. The last call counts.
bool note_exit_status(const char* folder, const char* path, const char* fields) {
#if defined(__GLIBC__)
  if (strlen(folder) >= sizeof g_exit_note.folder || strlen(path) >= sizeof g_exit_note.path ||
      strlen(fields) >= sizeof g_exit_note.fields)
    return false;
  const bool is_first = g_exit_note.pid != getpid();
  strcpy(g_exit_note.folder, folder);
  strcpy(g_exit_note.path, path);
  strcpy(g_exit_note.fields, fields);
  g_exit_note.pid = getpid();
  return !is_first || on_exit(append_exit_status, nullptr) == 0;
#else
  return false;
#endif
}

}  // namespace
}  // namespace rankcall
