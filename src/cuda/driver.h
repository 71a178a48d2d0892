// CUDA's driver library, loaded with dlopen when it is first asked for.
//
// One table of function pointers for the process. A wheel serves machines with and without a GPU:
// where the library, a function of it or a device is missing, `driver()` throws an Error that says
// which, every time it is asked. The environment variable CALLGATE_CUDA_DRIVER names another
// library than libcuda.so.1; tests use it.
#pragma once

#include <string>

#include "cuda/types.h"

// X(member, symbol, arguments): every one returns a Result.
#define CALLGATE_CUDA_FUNCTIONS(X)                                                                \
  X(init, "cuInit", (unsigned flags))                                                             \
  X(driver_version, "cuDriverGetVersion", (int* version))                                         \
  X(error_name, "cuGetErrorName", (Result result, const char** text))                             \
  X(error_string, "cuGetErrorString", (Result result, const char** text))                         \
  X(device_count, "cuDeviceGetCount", (int* count))                                               \
  X(device_get, "cuDeviceGet", (DeviceHandle * device, int ordinal))                              \
  X(device_name, "cuDeviceGetName", (char* name, int length, DeviceHandle device))                \
  X(device_attribute, "cuDeviceGetAttribute",                                                     \
    (int* value, DeviceAttribute attribute, DeviceHandle device))                                 \
  X(primary_context_retain, "cuDevicePrimaryCtxRetain", (Context * context, DeviceHandle device)) \
  X(context_current, "cuCtxGetCurrent", (Context * context))                                      \
  X(context_set_current, "cuCtxSetCurrent", (Context context))                                    \
  X(context_device, "cuCtxGetDevice", (DeviceHandle * device))                                    \
  X(stream_context, "cuStreamGetCtx", (Stream stream, Context * context))                         \
  X(stream_create, "cuStreamCreate", (Stream * stream, unsigned flags))                           \
  X(stream_destroy, "cuStreamDestroy_v2", (Stream stream))                                        \
  X(stream_synchronize, "cuStreamSynchronize", (Stream stream))                                   \
  X(stream_wait_event, "cuStreamWaitEvent", (Stream stream, Event event, unsigned flags))         \
  X(stream_is_capturing, "cuStreamIsCapturing", (Stream stream, CaptureStatus * status))          \
  X(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", (CaptureMode * mode))             \
  X(launch_host_function, "cuLaunchHostFunc",                                                     \
    (Stream stream, void (*function)(void*), void* data))                                         \
  X(event_create, "cuEventCreate", (Event * event, unsigned flags))                               \
  X(event_destroy, "cuEventDestroy_v2", (Event event))                                            \
  X(event_record, "cuEventRecord", (Event event, Stream stream))                                  \
  X(event_query, "cuEventQuery", (Event event))                                                   \
  X(event_synchronize, "cuEventSynchronize", (Event event))                                       \
  X(mem_alloc, "cuMemAlloc_v2", (DevicePointer * pointer, std::size_t bytes))                     \
  X(mem_free, "cuMemFree_v2", (DevicePointer pointer))                                            \
  X(mem_host_alloc, "cuMemHostAlloc", (void** pointer, std::size_t bytes, unsigned flags))        \
  X(mem_free_host, "cuMemFreeHost", (void* pointer))                                              \
  X(copy_to_host, "cuMemcpyDtoHAsync_v2",                                                         \
    (void* to, DevicePointer from, std::size_t bytes, Stream stream))                             \
  X(copy_to_device, "cuMemcpyHtoDAsync_v2",                                                       \
    (DevicePointer to, const void* from, std::size_t bytes, Stream stream))                       \
  X(copy_on_device, "cuMemcpyDtoDAsync_v2",                                                       \
    (DevicePointer to, DevicePointer from, std::size_t bytes, Stream stream))                     \
  X(set_8, "cuMemsetD8Async",                                                                     \
    (DevicePointer to, unsigned char value, std::size_t count, Stream stream))                    \
  X(pointer_attribute, "cuPointerGetAttribute",                                                   \
    (void* value, PointerAttribute attribute, DevicePointer pointer))                             \
  X(module_load, "cuModuleLoadData", (Module * module, const void* image))                        \
  X(module_unload, "cuModuleUnload", (Module module))                                             \
  X(module_function, "cuModuleGetFunction",                                                       \
    (Function * function, Module module, const char* name))                                       \
  X(function_attribute, "cuFuncGetAttribute",                                                     \
    (int* value, FunctionAttribute attribute, Function function))                                 \
  X(function_set_attribute, "cuFuncSetAttribute",                                                 \
    (Function function, FunctionAttribute attribute, int value))                                  \
  X(launch, "cuLaunchKernel",                                                                     \
    (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,      \
     unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream stream, void** parameters, \
     void** extra))

// Functions that older drivers lack: null there.
#define CALLGATE_CUDA_OPTIONAL_FUNCTIONS(X)                                               \
  X(stream_wait_value, "cuStreamWaitValue32_v2",                                          \
    (Stream stream, DevicePointer address, std::uint32_t value, unsigned flags))          \
  X(capture_info, "cuStreamGetCaptureInfo_v2",                                            \
    (Stream stream, CaptureStatus * status, std::uint64_t* id, Graph* graph,              \
     const GraphNode** dependencies, std::size_t* count))                                 \
  X(user_object_create, "cuUserObjectCreate",                                             \
    (UserObject * object, void* data, void (*destroy)(void*), unsigned references,        \
     unsigned flags))                                                                     \
  X(user_object_release, "cuUserObjectRelease", (UserObject object, unsigned references)) \
  X(graph_retain_object, "cuGraphRetainUserObject",                                       \
    (Graph graph, UserObject object, unsigned references, unsigned flags))                \
  X(launch_ex, "cuLaunchKernelEx",                                                        \
    (const LaunchConfig* config, Function function, void** parameters, void** extra))     \
  X(parameter_info, "cuFuncGetParamInfo",                                                 \
    (Function function, std::size_t index, std::size_t* offset, std::size_t* size))

namespace callgate::cuda {

struct Driver {
#define X(member, symbol, arguments) Result(*member) arguments = nullptr;
  CALLGATE_CUDA_FUNCTIONS(X)
  CALLGATE_CUDA_OPTIONAL_FUNCTIONS(X)
#undef X
  int version = 0;  // 1000 * major + 10 * minor
};

// The table of the library at `path`, initialised. Throws Error as driver() does.
Driver load_driver(const std::string& path);

// The driver, initialised. Throws Error where there is none, it is too old or has no device.
const Driver& driver();

// The same, or null where it was not asked for yet or could not be had.
const Driver* loaded_driver() noexcept;

// "CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
std::string error_text(Result result);

// Throws Error unless the call of `what` succeeded: "cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (out
// of memory)".
void check(Result result, const char* what);

}  // namespace callgate::cuda
