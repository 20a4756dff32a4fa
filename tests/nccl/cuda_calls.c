/* Counts the calls of CUDA's runtime and of NCCL, for each thread. It is preloaded in front of the
 * libraries that it counts; cuda_calls.py writes names.h, with X(number, name) for each function.
 *
 * A function has a stub: it counts, and jumps to the function itself, so that no signature is needed.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef __x86_64__
#error "the stubs are written for x86-64"
#endif

enum { THREADS = 1024 };
#define X(number, name) #name,
static const char* const names[] = {
#include "names.h"
};
#undef X
enum { FUNCTIONS = sizeof(names) / sizeof(*names) };

__attribute__((visibility("hidden"))) void* calls_real[FUNCTIONS];
static unsigned counts[THREADS][FUNCTIONS];
static int tids[THREADS];
static atomic_int slots;
static __thread int slot __attribute__((tls_model("initial-exec"))) = -1;
static atomic_int failing; /* whether no event that takes times can be made */

/* It must leave the registers alone that carry floating-point arguments. */
__attribute__((visibility("hidden"), target("general-regs-only"))) void calls_count(int number) {
  if (slot < 0) {
    slot = atomic_fetch_add(&slots, 1) % THREADS;
    tids[slot] = (int)syscall(SYS_gettid);
  }
  counts[slot][number]++;
}

#define X(number, name)                                                                            \
  __asm__(".globl " #name "\n.type " #name ", @function\n" #name ":\n"                             \
          "push %rdi\npush %rsi\npush %rdx\npush %rcx\npush %r8\npush %r9\npush %rax\n"            \
          "mov $" #number ", %edi\ncall calls_count\n"                                             \
          "pop %rax\npop %r9\npop %r8\npop %rcx\npop %rdx\npop %rsi\npop %rdi\n"                   \
          "jmp *calls_real+8*" #number "(%rip)\n.size " #name ", .-" #name "\n");
#include "names.h"
#undef X

static int (*real_create)(void**, unsigned);
static int create_event(void** event, unsigned flags) {
  enum { OUT_OF_MEMORY = 2, TAKES_TIMES = 0 };
  if (flags == TAKES_TIMES && atomic_load(&failing)) return OUT_OF_MEMORY;
  return real_create(event, flags);
}

static void begin_in_child(void) {
  memset(counts, 0, sizeof counts);
  atomic_store(&slots, 0);
  slot = -1;
}

__attribute__((constructor)) static void find_functions(void) {
  for (int number = 0; number < FUNCTIONS; number++) {
    calls_real[number] = dlsym(RTLD_NEXT, names[number]);
    if (!strcmp(names[number], "cudaEventCreateWithFlags")) {
      real_create = (int (*)(void**, unsigned))calls_real[number];
      calls_real[number] = (void*)create_event;
    }
  }
  pthread_atfork(0, 0, begin_in_child);
}

/* For the ranks, by ctypes. */
int calls_threads(void) { return atomic_load(&slots); }
int calls_tid(int thread) { return tids[thread]; }
int calls_functions(void) { return FUNCTIONS; }
const char* calls_name(int number) { return names[number]; }
unsigned calls_of(int thread, int number) { return counts[thread][number]; }
void calls_fail_events(int on) { atomic_store(&failing, on); }
