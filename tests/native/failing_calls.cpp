// Preloaded: the system call number n of those that are ours fails once.
//
// fail_at(roots, n, error) begins to count anew; n = 0 counts without a failure. calls_made() returns the count, and
// failed_call() the name of the call that has failed. Calls that touch a file below one of the folders are ours, so
// the program's own files, Python's imports and torch's libraries are left alone.
//
// "sockets" among the roots: so are the calls about processes, threads, sockets and other descriptors that come from
// Python itself, and from its standard library, but not from the libraries in C++ that torch brings. "threads": only
// those that start a process or a thread.

#include <cerrno>
#include <cstdarg>
#include <cstring>
#include <dlfcn.h>
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>

namespace {

char roots[4096];  // separated by newlines
std::atomic<long> calls{0};
long fails_at = 0;
int error_number = 0;
const char* failed = "";
char only[64] = "";  // calls of other names do not count, if it is not empty
std::atomic<bool> tracked[4096], is_paused{false};
bool count_threads = false, count_sockets = false;

bool is_ours(const char* path) {
    for (const char* root = roots; path != nullptr && *root != '\0';) {
        const char* end = strchrnul(root, '\n');
        if (std::strncmp(path, root, end - root) == 0) return true;
        root = *end == '\n' ? end + 1 : end;
    }
    return false;
}

bool is_ours(int fd) { return fd >= 0 && fd < 4096 && tracked[fd]; }

bool fails(bool ours, const char* name) {
    if (!ours || is_paused || (*only && std::strcmp(only, name))) return false;
    if (++calls != fails_at) return false;
    failed = name;
    errno = error_number;
    return true;
}

int track(int fd, bool ours) {
    if (fd >= 0 && fd < 4096) tracked[fd] = ours;
    return fd;
}

// Whether the code at an address is Python's own: the interpreter, or an extension of its standard library.
bool is_pythons(const void* address) {
    Dl_info about;
    if (!dladdr(address, &about) || about.dli_fname == nullptr) return false;
    const char* slash = std::strrchr(about.dli_fname, '/');
    const char* name = slash ? slash + 1 : about.dli_fname;
    return !std::strncmp(name, "libpython", 9) || !std::strncmp(name, "python", 6) ||
           std::strstr(about.dli_fname, "/lib-dynload/") != nullptr;
}

template <class F>
F real(const char* name, F) {
    return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

}  // namespace

#define REAL(name) static const auto next = real(#name, &name)
// Of the function that this one was called from.
#define BY_PYTHON(counted) (counted && is_pythons(__builtin_return_address(0)))

extern "C" {

void fail_at(const char* folders, long number, int error) {
    std::strncpy(roots, folders, sizeof roots - 1);
    calls = 0;
    fails_at = number;
    error_number = error;
    failed = "";
    count_sockets = std::strstr(roots, "sockets") != nullptr;
    count_threads = count_sockets || std::strstr(roots, "threads") != nullptr;
}
void count_only(const char* name) { std::strncpy(only, name, sizeof only - 1); }
void set_paused(int is_so) { is_paused = is_so != 0; }
long calls_made() { return calls; }
const char* failed_call() { return failed; }

#define OPEN(name)                                                 \
    int name(const char* path, int flags, ...) {                   \
        REAL(name);                                                \
        va_list rest;                                              \
        va_start(rest, flags);                                     \
        const mode_t mode = va_arg(rest, mode_t);                  \
        va_end(rest);                                              \
        const bool ours = is_ours(path);                           \
        if (fails(ours, #name)) return -1;                         \
        return track(next(path, flags, mode), ours);               \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                               \
    int name(int folder, const char* path, int flags, ...) {       \
        REAL(name);                                                \
        va_list rest;                                              \
        va_start(rest, flags);                                     \
        const mode_t mode = va_arg(rest, mode_t);                  \
        va_end(rest);                                              \
        const bool ours = is_ours(path) || is_ours(folder);        \
        if (fails(ours, #name)) return -1;                         \
        return track(next(folder, path, flags, mode), ours);       \
    }
OPENAT(openat)
OPENAT(openat64)

int memfd_create(const char* name, unsigned flags) noexcept {
    REAL(memfd_create);
    const bool ours = std::strncmp(name, "rankcall", 8) == 0;
    if (fails(ours, "memfd_create")) return -1;
    return track(next(name, flags), ours);
}

#define ONE_PATH(name, type, argument)                             \
    int name(const char* path, type argument) noexcept {           \
        REAL(name);                                                \
        return fails(is_ours(path), #name) ? -1 : next(path, argument); \
    }
ONE_PATH(mkdir, mode_t, mode)
ONE_PATH(chmod, mode_t, mode)

#define PATH_ONLY(name)                                            \
    int name(const char* path) noexcept {                          \
        REAL(name);                                                \
        return fails(is_ours(path), #name) ? -1 : next(path);      \
    }
PATH_ONLY(unlink)
PATH_ONLY(rmdir)

#define TWO_PATHS(name)                                            \
    int name(const char* from, const char* to) noexcept {          \
        REAL(name);                                                \
        return fails(is_ours(from) || is_ours(to), #name) ? -1 : next(from, to); \
    }
TWO_PATHS(rename)
TWO_PATHS(link)
TWO_PATHS(symlink)

int linkat(int from_fd, const char* from, int to_fd, const char* to, int flags) noexcept {
    REAL(linkat);
    return fails(is_ours(from) || is_ours(to), "linkat") ? -1 : next(from_fd, from, to_fd, to, flags);
}

ssize_t write(int fd, const void* data, size_t size) {
    REAL(write);
    return fails(is_ours(fd), "write") ? -1 : next(fd, data, size);
}
ssize_t read(int fd, void* data, size_t size) {
    REAL(read);
    return fails(is_ours(fd), "read") ? -1 : next(fd, data, size);
}

#define POSITIONED(name, pointer, offset_type)                     \
    ssize_t name(int fd, pointer data, size_t size, offset_type at) { \
        REAL(name);                                                \
        return fails(is_ours(fd), #name) ? -1 : next(fd, data, size, at); \
    }
POSITIONED(pwrite, const void*, off_t)
POSITIONED(pwrite64, const void*, off64_t)
POSITIONED(pread, void*, off_t)
POSITIONED(pread64, void*, off64_t)

#define RESIZE(name, offset_type)                                  \
    int name(int fd, offset_type size) noexcept {                  \
        REAL(name);                                                \
        return fails(is_ours(fd), #name) ? -1 : next(fd, size);    \
    }
RESIZE(ftruncate, off_t)
RESIZE(ftruncate64, off64_t)

#define ALLOCATE(name, offset_type)                                \
    int name(int fd, offset_type at, offset_type size) {           \
        REAL(name);                                                \
        return fails(is_ours(fd), #name) ? error_number : next(fd, at, size); \
    }
ALLOCATE(posix_fallocate, off_t)
ALLOCATE(posix_fallocate64, off64_t)

int fsync(int fd) {
    REAL(fsync);
    return fails(is_ours(fd), "fsync") ? -1 : next(fd);
}
int fchmod(int fd, mode_t mode) noexcept {
    REAL(fchmod);
    return fails(is_ours(fd), "fchmod") ? -1 : next(fd, mode);
}

#define MAP(name, offset_type)                                     \
    void* name(void* at, size_t size, int prot, int flags, int fd, offset_type offset) noexcept { \
        REAL(name);                                                \
        return fails(is_ours(fd), #name) ? MAP_FAILED : next(at, size, prot, flags, fd, offset); \
    }
MAP(mmap, off_t)
MAP(mmap64, off64_t)

// What Python's stat(), exists(), is_file(), iterdir() and copy() ask for.
#define STAT_PATH(name, type)                                      \
    int name(const char* path, struct type* about) noexcept {      \
        REAL(name);                                                \
        return fails(is_ours(path), #name) ? -1 : next(path, about); \
    }
STAT_PATH(stat, stat)
STAT_PATH(stat64, stat64)
STAT_PATH(lstat, stat)
STAT_PATH(lstat64, stat64)
STAT_PATH(statvfs, statvfs)
STAT_PATH(statvfs64, statvfs64)

#define STAT_FD(name, type)                                        \
    int name(int fd, struct type* about) noexcept {                \
        REAL(name);                                                \
        return fails(is_ours(fd), #name) ? -1 : next(fd, about);   \
    }
STAT_FD(fstat, stat)
STAT_FD(fstat64, stat64)

#define STAT_AT(name, type)                                        \
    int name(int fd, const char* path, struct type* about, int flags) noexcept { \
        REAL(name);                                                \
        const bool ours = is_ours(path) || is_ours(fd);            \
        return fails(ours, #name) ? -1 : next(fd, path, about, flags); \
    }
STAT_AT(fstatat, stat)
STAT_AT(fstatat64, stat64)

DIR* opendir(const char* path) {
    REAL(opendir);
    return fails(is_ours(path), "opendir") ? nullptr : next(path);
}
DIR* fdopendir(int fd) {
    REAL(fdopendir);
    return fails(is_ours(fd), "fdopendir") ? nullptr : next(fd);
}
int flock(int fd, int how) noexcept {
    REAL(flock);
    return fails(is_ours(fd), "flock") ? -1 : next(fd, how);
}
int utimensat(int folder, const char* path, const struct timespec* times, int flags) noexcept {
    REAL(utimensat);
    return fails(is_ours(path), "utimensat") ? -1 : next(folder, path, times, flags);
}

#define SEND(name, offset_type)                                    \
    ssize_t name(int to, int from, offset_type* at, size_t size) noexcept { \
        REAL(name);                                                \
        return fails(is_ours(to) || is_ours(from), #name) ? -1 : next(to, from, at, size); \
    }
SEND(sendfile, off_t)
SEND(sendfile64, off64_t)

pid_t fork() noexcept {
    REAL(fork);
    return fails(BY_PYTHON(count_threads), "fork") ? -1 : next();
}
int pthread_create(pthread_t* thread, const pthread_attr_t* about, void* (*run)(void*), void* argument) noexcept {
    REAL(pthread_create);
    return fails(BY_PYTHON(count_threads), "pthread_create") ? EAGAIN : next(thread, about, run, argument);
}
long syscall(long number, ...) noexcept {
    REAL(syscall);
    va_list rest;
    va_start(rest, number);
    long with[6];
    for (long& one : with) one = va_arg(rest, long);
    va_end(rest);
    const bool ours = number == SYS_pidfd_open && BY_PYTHON(count_threads);
    return fails(ours, "pidfd_open") ? -1 : next(number, with[0], with[1], with[2], with[3], with[4], with[5]);
}

int pipe2(int* ends, int flags) noexcept {
    REAL(pipe2);
    if (fails(BY_PYTHON(count_sockets), "pipe2")) return -1;
    return next(ends, flags);
}
#define DESCRIPTOR(name, parameters, ...)                          \
    int name parameters noexcept {                                 \
        REAL(name);                                                \
        const bool ours = BY_PYTHON(count_sockets);                \
        return fails(ours, #name) ? -1 : track(next(__VA_ARGS__), ours); \
    }
DESCRIPTOR(socket, (int family, int type, int protocol), family, type, protocol)
DESCRIPTOR(epoll_create1, (int flags), flags)
DESCRIPTOR(eventfd, (unsigned start, int flags), start, flags)
int accept4(int fd, struct sockaddr* address, socklen_t* size, int flags) {
    REAL(accept4);
    const bool ours = BY_PYTHON(count_sockets);
    return fails(ours, "accept4") ? -1 : track(next(fd, address, size, flags), ours);
}
int socketpair(int family, int type, int protocol, int* ends) noexcept {
    REAL(socketpair);
    if (fails(BY_PYTHON(count_sockets), "socketpair")) return -1;
    const int done = next(family, type, protocol, ends);
    if (done == 0) track(ends[0], count_sockets), track(ends[1], count_sockets);
    return done;
}

#define ON_SOCKET(name, result, parameters, ...)                   \
    result name parameters {                                       \
        REAL(name);                                                \
        return fails(is_ours(fd), #name) ? -1 : next(fd, __VA_ARGS__); \
    }
ON_SOCKET(bind, int, (int fd, const struct sockaddr* address, socklen_t size) noexcept, address, size)
ON_SOCKET(listen, int, (int fd, int queue) noexcept, queue)
ON_SOCKET(connect, int, (int fd, const struct sockaddr* address, socklen_t size), address, size)
ON_SOCKET(setsockopt, int, (int fd, int level, int name_, const void* value, socklen_t size) noexcept, level, name_,
          value, size)
ON_SOCKET(getsockname, int, (int fd, struct sockaddr* address, socklen_t* size) noexcept, address, size)
ON_SOCKET(send, ssize_t, (int fd, const void* data, size_t size, int flags), data, size, flags)
ON_SOCKET(recv, ssize_t, (int fd, void* data, size_t size, int flags), data, size, flags)
ON_SOCKET(epoll_ctl, int, (int fd, int what, int other, struct epoll_event* event) noexcept, what, other, event)

int close(int fd) {
    REAL(close);
    track(fd, false);
    return next(fd);
}

}  // extern "C"
