// SPDX-License-Identifier: Apache-2.0
// CUDA's driver as callgate alone sees it: hands every call on to libcuda.so.1, but for those that
// a test asked to fail. XLA calls the same driver past it.
//
// Compiled with -DFUNCTIONS="X(cuInit) X(cuDeviceGet) ...", the names in src/cuda/driver.h, for
// CALLGATE_CUDA_DRIVER. All arguments are integers and pointers, eleven at the most; a word too
// many is passed on as it is found. A call that fails does nothing, as in the fake driver.
#define _GNU_SOURCE  // pthread_getname_np
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

typedef int (*Call)(long, long, long, long, long, long, long, long, long, long, long);

enum {
#define X(name) k_##name,
  FUNCTIONS
#undef X
      kCount
};

static const char* const kNames[] = {
#define X(name) #name,
    FUNCTIONS
#undef X
};

static struct {
  Call call;
  int calls, result, after, count, failed;
  char thread;
} table[kCount];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

__attribute__((constructor)) static void look_up(void) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  for (int i = 0; driver != NULL && i < kCount; ++i) {
    table[i].call = (Call)dlsym(driver, kNames[i]);
  }
}

// 'c' for the thread that waits for what a device has done, src/cuda/completions.cc; 'p' for
// others.
static char this_thread(void) {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof(name));
  return strncmp(name, "cg-cuda", 7) == 0 ? 'c' : 'p';
}

static int fails(int which) {
  char thread = this_thread();
  pthread_mutex_lock(&mutex);
  int result = 0;
  ++table[which].calls;
  int meant = table[which].thread == '*' || table[which].thread == thread;
  if (meant && table[which].count > 0 && table[which].after-- <= 0) {
    --table[which].count;
    ++table[which].failed;
    result = table[which].result;
  }
  pthread_mutex_unlock(&mutex);
  return result;
}

#define X(name)                                                                            \
  int name(long a, long b, long c, long d, long e, long f, long g, long h, long i, long j, \
           long k) {                                                                       \
    int result = fails(k_##name);                                                          \
    return result != 0 ? result : table[k_##name].call(a, b, c, d, e, f, g, h, i, j, k);   \
  }
FUNCTIONS
#undef X

static int index_of(const char* name) {
  for (int i = 0; i < kCount; ++i) {
    if (strcmp(kNames[i], name) == 0) return i;
  }
  return -1;
}

// After `after` more calls of the function `count` calls return `result`: those of all threads for
// '*', else see this_thread().
void failing_set(const char* name, int result, int after, int count, char thread) {
  int found = index_of(name);
  if (found < 0) return;
  pthread_mutex_lock(&mutex);
  table[found].result = result;
  table[found].after = after;
  table[found].count = count;
  table[found].thread = thread;
  pthread_mutex_unlock(&mutex);
}

// Forgets the faults that were asked for, and the counts.
void failing_clear(void) {
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < kCount; ++i) table[i].calls = table[i].failed = table[i].count = 0;
  pthread_mutex_unlock(&mutex);
}

// Since failing_clear(): how often callgate called the function, and how often that failed.
int failing_calls(const char* name) {
  int found = index_of(name);
  return found < 0 ? 0 : table[found].calls;
}
int failing_failed(const char* name) {
  int found = index_of(name);
  return found < 0 ? 0 : table[found].failed;
}
