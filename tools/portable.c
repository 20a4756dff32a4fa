/* What a compiler on a new system takes from its C library, for a library that must load on older ones.
 *
 * These definitions are hidden in the library that they are linked into. torch's wheels, and so ours,
 * need glibc 2.28; without this file, a compiler on Debian 12 makes a library that needs 2.34. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <time.h>

/* glibc 2.32: not 0 while the process has one thread. 0 is always true enough. */
char __libc_single_threaded = 0;

/* dlsym moved from libdl into libc in glibc 2.34, which has the old name as well. */
#if defined(__x86_64__)
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");
#elif defined(__aarch64__)
__asm__(".symver dlsym, dlsym@GLIBC_2.17");
#endif

/* glibc 2.30. Before that, a wait can only end by the wall clock: a second at most, so that a step of
 * that clock is seen soon. The callers' loops compare their own clock. */
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const struct timespec* until) {
  typedef int (*Wait)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const struct timespec*);
  static Wait newer;
  static int is_known;
  if (!__atomic_load_n(&is_known, __ATOMIC_ACQUIRE)) {
    newer = (Wait)dlsym(RTLD_DEFAULT, "pthread_cond_clockwait");
    __atomic_store_n(&is_known, 1, __ATOMIC_RELEASE);
  }
  if (newer) return newer(condition, mutex, clock, until);
  struct timespec now, end;
  clock_gettime(clock, &now);
  long long left = (until->tv_sec - now.tv_sec) * 1000000000LL + until->tv_nsec - now.tv_nsec;
  if (left <= 0) return ETIMEDOUT;
  if (left > 1000000000LL) left = 1000000000LL;
  clock_gettime(CLOCK_REALTIME, &end);
  end.tv_sec += (end.tv_nsec + left) / 1000000000LL;
  end.tv_nsec = (end.tv_nsec + left) % 1000000000LL;
  return pthread_cond_timedwait(condition, mutex, &end);
}
