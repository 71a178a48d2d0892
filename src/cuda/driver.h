// SPDX-License-Identifier: Apache-2.0
// CUDA's driver library, loaded with dlopen at the first request, and the part of its interface
// that callgate uses.
//
// A wheel serves machines with and without a GPU. If the library, one of its functions, or a device
// is missing, each call of `driver()` throws an Error with the reason. The environment variable
// CALLGATE_CUDA_DRIVER names a library to use instead of libcuda.so.1; tests use it.
//
// Neither building nor loading callgate needs CUDA: numbers and layouts are those of CUDA's stable
// ABI (driver 11.4 and later; newer parts are marked). Names follow the driver's, without its
// prefix.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

// X(member, symbol, arguments): each returns a Result.
#define CALLGATE_CUDA_FUNCTIONS(X)                                                                \
  X(init, "cuInit", (unsigned flags))                                                             \
  X(driver_version, "cuDriverGetVersion", (int* version))                                         \
  X(error_name, "cuGetErrorName", (Result, const char** text))                                    \
  X(error_string, "cuGetErrorString", (Result, const char** text))                                \
  X(device_count, "cuDeviceGetCount", (int* count))                                               \
  X(device_get, "cuDeviceGet", (DeviceHandle*, int ordinal))                                      \
  X(device_name, "cuDeviceGetName", (char* name, int length, DeviceHandle))                       \
  X(device_attribute, "cuDeviceGetAttribute", (int* value, DeviceAttribute, DeviceHandle))        \
  X(primary_context_retain, "cuDevicePrimaryCtxRetain", (Context*, DeviceHandle))                 \
  X(context_current, "cuCtxGetCurrent", (Context*))                                               \
  X(context_set_current, "cuCtxSetCurrent", (Context))                                            \
  X(context_device, "cuCtxGetDevice", (DeviceHandle*))                                            \
  X(stream_context, "cuStreamGetCtx", (Stream, Context*))                                         \
  X(stream_create, "cuStreamCreate", (Stream*, unsigned flags))                                   \
  X(stream_synchronize, "cuStreamSynchronize", (Stream))                                          \
  X(stream_wait_event, "cuStreamWaitEvent", (Stream, Event, unsigned flags))                      \
  X(stream_is_capturing, "cuStreamIsCapturing", (Stream, CaptureStatus*))                         \
  X(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", (CaptureMode*))                   \
  X(launch_host_function, "cuLaunchHostFunc", (Stream, void (*function)(void*), void* data))      \
  X(event_create, "cuEventCreate", (Event*, unsigned flags))                                      \
  X(event_destroy, "cuEventDestroy_v2", (Event))                                                  \
  X(event_record, "cuEventRecord", (Event, Stream))                                               \
  X(event_query, "cuEventQuery", (Event))                                                         \
  X(event_synchronize, "cuEventSynchronize", (Event))                                             \
  X(mem_alloc, "cuMemAlloc_v2", (DevicePointer*, std::size_t bytes))                              \
  X(mem_free, "cuMemFree_v2", (DevicePointer))                                                    \
  X(mem_host_alloc, "cuMemHostAlloc", (void**, std::size_t bytes, unsigned flags))                \
  X(mem_free_host, "cuMemFreeHost", (void*))                                                      \
  X(copy_to_host, "cuMemcpyDtoHAsync_v2", (void* to, DevicePointer from, std::size_t, Stream))    \
  X(copy_to_device, "cuMemcpyHtoDAsync_v2", (DevicePointer to, const void*, std::size_t, Stream)) \
  X(copy_on_device, "cuMemcpyDtoDAsync_v2",                                                       \
    (DevicePointer to, DevicePointer from, std::size_t bytes, Stream))                            \
  X(set_8, "cuMemsetD8Async", (DevicePointer, unsigned char value, std::size_t count, Stream))    \
  X(pointer_attribute, "cuPointerGetAttribute", (void* value, PointerAttribute, DevicePointer))   \
  X(module_load, "cuModuleLoadData", (Module*, const void* image))                                \
  X(module_unload, "cuModuleUnload", (Module))                                                    \
  X(module_function, "cuModuleGetFunction", (Function*, Module, const char* name))                \
  X(function_attribute, "cuFuncGetAttribute", (int* value, FunctionAttribute, Function))          \
  X(function_set_attribute, "cuFuncSetAttribute", (Function, FunctionAttribute, int value))       \
  X(launch, "cuLaunchKernel",                                                                     \
    (Function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,               \
     unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream, void** parameters,        \
     void** extra))

// Functions that older drivers lack: null there.
#define CALLGATE_CUDA_OPTIONAL_FUNCTIONS(X)                                                    \
  X(stream_wait_value, "cuStreamWaitValue32_v2",                                               \
    (Stream, DevicePointer, std::uint32_t value, unsigned flags))                              \
  X(capture_info, "cuStreamGetCaptureInfo_v2",                                                 \
    (Stream, CaptureStatus*, std::uint64_t* id, Graph*, const GraphNode** dependencies,        \
     std::size_t* count))                                                                      \
  X(user_object_create, "cuUserObjectCreate",                                                  \
    (UserObject*, void* data, void (*destroy)(void*), unsigned references, unsigned flags))    \
  X(user_object_release, "cuUserObjectRelease", (UserObject, unsigned references))             \
  X(graph_retain_object, "cuGraphRetainUserObject",                                            \
    (Graph, UserObject, unsigned references, unsigned flags))                                  \
  X(launch_ex, "cuLaunchKernelEx", (const LaunchConfig*, Function, void** parameters, void**)) \
  X(mem_host_register, "cuMemHostRegister_v2", (void*, std::size_t bytes, unsigned flags))     \
  X(mem_host_unregister, "cuMemHostUnregister", (void*))

namespace callgate::cuda {

// Opaque types of the driver.
using Context = struct ContextHandle*;
using Stream = struct StreamHandle*;
using Event = struct EventHandle*;
using Module = struct ModuleHandle*;
using Function = struct FunctionHandle*;
using Graph = struct GraphHandle*;
using GraphNode = struct GraphNodeHandle*;
using UserObject = struct UserObjectHandle*;
using DevicePointer = std::uint64_t;
using DeviceHandle = int;

enum class Result : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kNoDevice = 100,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kLaunchFailed = 719,
  kNotSupported = 801,
  kStreamCaptureUnsupported = 900,
  kStreamCaptureInvalidated = 901,
};

enum class DeviceAttribute : int {
  kMaxThreadsPerBlock = 1,
  kMultiprocessorCount = 16,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kMaxSharedMemoryPerBlockOptin = 97,
};

enum class FunctionAttribute : int {
  kMaxThreadsPerBlock = 0,
  kSharedSizeBytes = 1,
  kNumRegs = 4,
  kMaxDynamicSharedSizeBytes = 8,
  kNonPortableClusterSizeAllowed = 15,
};

enum class PointerAttribute : int { kDeviceOrdinal = 9 };

enum class CaptureStatus : int { kNone = 0, kActive = 1, kInvalidated = 2 };
enum class CaptureMode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };

inline constexpr unsigned kStreamNonBlocking = 1, kEventBlockingSync = 1, kEventDisableTiming = 2,
                          kHostAllocPortable = 1, kWaitValueGeq = 0;

// cuLaunchKernelEx (driver 11.8): a launch with thread block clusters.
enum class LaunchAttributeId : int { kClusterDimension = 4 };

struct LaunchAttribute {
  LaunchAttributeId id;
  char padding[4];
  unsigned cluster[3];  // of kClusterDimension
  char rest[52];        // other attributes have up to 64 bytes
};
static_assert(sizeof(LaunchAttribute) == 72);

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

struct Driver {
#define X(member, symbol, arguments) Result(*member) arguments = nullptr;
  CALLGATE_CUDA_FUNCTIONS(X)
  CALLGATE_CUDA_OPTIONAL_FUNCTIONS(X)
#undef X
  int version = 0;  // 1000 * major + 10 * minor
};

// The table of the library at `path`, initialized. Throws Error like driver().
Driver load_driver(const std::string& path);

// The initialized driver. Throws Error if there is none, it is too old or has no device.
const Driver& driver();

// The same, or null before its first use or if it isn't available.
const Driver* loaded_driver() noexcept;

std::string error_text(Result result);  // "CUDA_ERROR_OUT_OF_MEMORY (out of memory)"
std::string version_text(int version);  // "12.8", for a version number of the driver

// Opens a library for good, because it may have running threads. Throws an Error at `where` with
// `what`.
void* open_library(const char* where, const std::string& path, const std::string& what);
// Adds the symbol to `missing` if the library lacks the function, which is then null.
void* look_up(void* library, const char* symbol, std::string& missing);

// Throws DriverError (device.h) unless the call `what` succeeded: "cuMemAlloc_v2:
// CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
void check(Result result, const char* what);

}  // namespace callgate::cuda
