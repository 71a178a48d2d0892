// SPDX-License-Identifier: Apache-2.0
// What tests do with the fake CUDA driver, beside calling it: set it up, put faults in, hold
// streams back, read and write device memory, and ask what happened.
//
// C, so that Python's ctypes can call it. Streams, graphs and functions are the driver's handles.
// Every function may be called from any thread, unless it says otherwise; none counts as a call of
// the driver. Text that is returned lives until fakecuda_clear(), but at least until the thread's
// next call of the same function.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__cplusplus)
#define FAKECUDA_API extern "C" __attribute__((visibility("default")))
#else
#define FAKECUDA_API
#endif

// A kernel: `parameters[i]` points to a copy of the i-th argument. Runs on the stream's thread.
// Returns what the launch ends with, 0 for success.
typedef int (*fakecuda_kernel)(const void** parameters, const unsigned grid[3],
                               const unsigned block[3], unsigned shared_bytes, void* user);

// One launch; of a graph's replay too.
typedef struct {
  const char* name;
  unsigned grid[3], block[3], cluster[3];  // cluster is 0 where none was asked for
  unsigned shared_bytes;
  void* stream;
  int replayed;  // 1 in a graph's replay
} fakecuda_launch;

// What is alive, without the test's own.
typedef struct {
  size_t device_allocations, device_bytes, pinned_allocations, pinned_bytes;
  size_t streams, events, modules, graphs;
} fakecuda_live;

// Set-up: before cuInit, but for attributes. Two devices of capability 9.0 unless set otherwise.
FAKECUDA_API void fakecuda_set_devices(int count);
FAKECUDA_API void fakecuda_set_version(int version);
FAKECUDA_API void fakecuda_set_attribute(int device, int attribute, int value);

// Forgets violations, failures, launches, counts of calls, delays and holds. Objects stay.
FAKECUDA_API void fakecuda_clear(void);

// Faults. After `after` more calls of the symbol the next `count` calls return `result`, for ever
// when it is negative.
FAKECUDA_API void fakecuda_fail(const char* symbol, int result, int after, int count);
// Every call fails with 719 from now on, and so does all work; 0 brings the device back, failed
// streams too.
FAKECUDA_API void fakecuda_lose(int lost);
// The stream's next work fails with `result`, and all that comes after it.
FAKECUDA_API void fakecuda_fail_stream(void* stream, int result);

// Time. Nothing of a held stream runs. hold_all() holds those that are made later, too.
FAKECUDA_API void fakecuda_hold(void* stream);
FAKECUDA_API void fakecuda_release(void* stream);
FAKECUDA_API void fakecuda_hold_all(int hold);
// Every copy takes so long.
FAKECUDA_API void fakecuda_delay_copies(unsigned microseconds);
// Waits until the stream has nothing to do. Host synchronisation, as cuStreamSynchronize is.
FAKECUDA_API int fakecuda_finish(void* stream);
// The works that the stream was given and that have not ended.
FAKECUDA_API size_t fakecuda_queued(void* stream);
// Live streams in the order in which they were made; returns how many there are.
FAKECUDA_API size_t fakecuda_streams(void** out, size_t capacity);
FAKECUDA_API int fakecuda_device_of(void* stream);

// Streams and memory of the test's own, on a device; no context needs to be current. Null and 0
// where there is none.
FAKECUDA_API void* fakecuda_new_stream(int device);
FAKECUDA_API void fakecuda_delete_stream(void* stream);
FAKECUDA_API uint64_t fakecuda_new_memory(int device, size_t bytes);
FAKECUDA_API void fakecuda_delete_memory(uint64_t pointer);
// The same, when the work that uses it has ended.
FAKECUDA_API void fakecuda_drop_memory(uint64_t pointer);
// At once, past all streams: 0, or 1 where the range is none of a live allocation.
FAKECUDA_API int fakecuda_read(void* to, uint64_t from, size_t bytes);
FAKECUDA_API int fakecuda_write(uint64_t to, const void* from, size_t bytes);
// Where the host finds what a device pointer points to, for kernels; null where it is invalid.
FAKECUDA_API void* fakecuda_host(uint64_t pointer);
// Work of no kernel: `function` runs on the stream, reading and writing the memory given, as far as
// the check of order goes. For producers and consumers that tests stand in for.
FAKECUDA_API int fakecuda_enqueue(void* stream, void (*function)(void*), void* data,
                                  const uint64_t* reads, size_t read_count, const uint64_t* writes,
                                  size_t write_count);

// Kernels by name, in every module. `sizes` are those of its parameters. Without a function it does
// nothing.
FAKECUDA_API void fakecuda_register_kernel(const char* name, fakecuda_kernel function,
                                           size_t parameters, const size_t* sizes, void* user);
// The parameter is a pointer that the kernel reads (1), writes (2) or both (3).
FAKECUDA_API void fakecuda_declare(const char* name, size_t parameter, int access);
// The first bytes of the image that a function came from: how many there were to load is not known,
// so as far as an ELF header, a fatbin header or the end of text says.
FAKECUDA_API size_t fakecuda_image_of(void* function, void* to, size_t capacity);
FAKECUDA_API size_t fakecuda_launch_count(void);
FAKECUDA_API int fakecuda_launch_at(size_t index, fakecuda_launch* launch);

// Capture, as XLA does it: in mode "thread local" unless said otherwise (0 global, 1 thread local,
// 2 relaxed). end gives null where the capture was invalidated or is not joined.
FAKECUDA_API int fakecuda_begin_capture(void* stream);
FAKECUDA_API int fakecuda_begin_capture_mode(void* stream, int mode);
FAKECUDA_API void* fakecuda_end_capture(void* stream);
FAKECUDA_API int fakecuda_replay(void* graph, void* stream);
FAKECUDA_API size_t fakecuda_graph_size(void* graph);
FAKECUDA_API void fakecuda_delete_graph(void* graph);

// What happened.
FAKECUDA_API size_t fakecuda_violation_count(void);
FAKECUDA_API const char* fakecuda_violation_at(size_t index);
FAKECUDA_API size_t fakecuda_calls(const char* symbol);
FAKECUDA_API void fakecuda_count_live(fakecuda_live* live);
