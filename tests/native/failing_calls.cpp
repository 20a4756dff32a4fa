// Preloaded: the system call number n that touches a file below given folders fails once.
//
// fail_at(roots, n, error) begins to count anew; n = 0 counts without a failure. calls_made() returns the count, and
// failed_call() the name of the call that has failed. Only files below the folders count, so that the program's own
// files, Python's imports and torch's libraries are left alone.

#include <cerrno>
#include <cstdarg>
#include <cstring>
#include <dlfcn.h>
#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
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
std::atomic<bool> tracked[4096];

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
    if (!ours || ++calls != fails_at) return false;
    failed = name;
    errno = error_number;
    return true;
}

int track(int fd, bool ours) {
    if (fd >= 0 && fd < 4096) tracked[fd] = ours;
    return fd;
}

template <class F>
F real(const char* name, F) {
    return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

}  // namespace

#define REAL(name) static const auto next = real(#name, &name)

extern "C" {

void fail_at(const char* folders, long number, int error) {
    std::strncpy(roots, folders, sizeof roots - 1);
    calls = 0;
    fails_at = number;
    error_number = error;
    failed = "";
}
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

int close(int fd) {
    REAL(close);
    track(fd, false);
    return next(fd);
}

}  // extern "C"
