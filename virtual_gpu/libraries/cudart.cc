// SPDX-License-Identifier: Apache-2.0
// What XLA and CuPy ask of libcudart, said with the driver's functions.
//
// The numbers of errors are the driver's own where both have them. An error stays for
// cudaGetLastError() in the thread that met it.
#include <cstddef>
#include <cstdint>
#include <cstring>

extern "C" {
int cuCtxGetDevice(int*);
int cuCtxSetCurrent(void*);
int cuCtxSynchronize();
int cuDeviceCanAccessPeer(int*, int, int);
int cuDeviceGetAttribute(int*, int, int);
int cuDeviceGetCount(int*);
int cuDeviceGetPCIBusId(char*, int, int);
int cuDevicePrimaryCtxRetain(void**, int);
int cuDriverGetVersion(int*);
int cuEventCreate(void**, unsigned);
int cuEventDestroy_v2(void*);
int cuEventElapsedTime(float*, void*, void*);
int cuEventQuery(void*);
int cuEventRecord(void*, void*);
int cuEventSynchronize(void*);
int cuGetErrorName(int, const char**);
int cuGetErrorString(int, const char**);
int cuInit(unsigned);
int cuLaunchHostFunc(void*, void (*)(void*), void*);
int cuMemAlloc_v2(std::uint64_t*, std::size_t);
int cuMemcpyAsync(std::uint64_t, std::uint64_t, std::size_t, void*);
int cuMemFree_v2(std::uint64_t);
int cuMemFreeHost(void*);
int cuMemGetInfo_v2(std::size_t*, std::size_t*);
int cuMemHostAlloc(void**, std::size_t, unsigned);
int cuMemsetD8Async(std::uint64_t, unsigned char, std::size_t, void*);
int cuPointerGetAttribute(void*, int, std::uint64_t);
int cuStreamCreateWithPriority(void**, unsigned, int);
int cuStreamDestroy_v2(void*);
int cuStreamGetFlags(void*, unsigned*);
int cuStreamGetPriority(void*, int*);
int cuStreamIsCapturing(void*, int*);
int cuStreamQuery(void*);
int cuStreamSynchronize(void*);
int cuStreamWaitEvent(void*, void*, unsigned);
}

namespace {

constexpr int kNotReady = 600;
thread_local int last_error = 0;

int said(int result) {
  if (result != 0 && result != kNotReady) last_error = result;
  return result;
}
std::uint64_t address(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

// The runtime makes a device's context current by itself.
int use(int device) {
  void* context = nullptr;
  if (int bad = cuInit(0); bad != 0) return bad;
  if (int bad = cuDevicePrimaryCtxRetain(&context, device); bad != 0) return bad;
  return cuCtxSetCurrent(context);
}

// cudaPointerAttributes
struct PointerAttributes {
  int type, device;
  void *device_pointer, *host_pointer;
};

}  // namespace

#define CUDART extern "C" __attribute__((visibility("default"))) int

CUDART cudaRuntimeGetVersion(int* version) {
  *version = 12080;
  return 0;
}
CUDART cudaDriverGetVersion(int* version) { return said(cuDriverGetVersion(version)); }
extern "C" __attribute__((visibility("default"))) const char* cudaGetErrorName(int error) {
  const char* text = nullptr;
  return cuGetErrorName(error, &text) == 0 ? text : "unknown";
}
extern "C" __attribute__((visibility("default"))) const char* cudaGetErrorString(int error) {
  const char* text = nullptr;
  return cuGetErrorString(error, &text) == 0 ? text : "unknown error";
}
CUDART cudaGetLastError() {
  int error = last_error;
  last_error = 0;
  return error;
}
CUDART cudaPeekAtLastError() { return last_error; }

CUDART cudaGetDevice(int* device) {
  *device = 0;
  cuCtxGetDevice(device);
  return 0;
}
CUDART cudaSetDevice(int device) { return said(use(device)); }
CUDART cudaGetDeviceCount(int* count) {
  if (int bad = cuInit(0); bad != 0) return said(bad);
  return said(cuDeviceGetCount(count));
}
CUDART cudaDeviceGetAttribute(int* value, int attribute, int device) {
  return said(cuDeviceGetAttribute(value, attribute, device));
}
CUDART cudaDeviceGetPCIBusId(char* text, int length, int device) {
  return said(cuDeviceGetPCIBusId(text, length, device));
}
CUDART cudaDeviceSynchronize() { return said(cuCtxSynchronize()); }
CUDART cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return said(cuDeviceCanAccessPeer(can, device, peer));
}
CUDART cudaDeviceEnablePeerAccess(int, unsigned) { return 0; }

CUDART cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total) {
  return said(cuMemGetInfo_v2(free_bytes, total));
}
CUDART cudaMalloc(void** pointer, std::size_t bytes) {
  std::uint64_t at = 0;
  int result = cuMemAlloc_v2(&at, bytes);
  *pointer = reinterpret_cast<void*>(at);
  return said(result);
}
CUDART cudaFree(void* pointer) {
  return pointer == nullptr ? 0 : said(cuMemFree_v2(address(pointer)));
}
CUDART cudaMallocAsync(void** pointer, std::size_t bytes, void*) {
  return cudaMalloc(pointer, bytes);
}
CUDART cudaFreeAsync(void* pointer, void*) { return cudaFree(pointer); }
CUDART cudaMallocHost(void** pointer, std::size_t bytes) {
  return said(cuMemHostAlloc(pointer, bytes, 0));
}
CUDART cudaHostAlloc(void** pointer, std::size_t bytes, unsigned flags) {
  return said(cuMemHostAlloc(pointer, bytes, flags));
}
CUDART cudaFreeHost(void* pointer) { return said(cuMemFreeHost(pointer)); }
CUDART cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int, void* stream) {
  return said(cuMemcpyAsync(address(to), address(from), bytes, stream));
}
CUDART cudaMemcpy(void* to, const void* from, std::size_t bytes, int kind) {
  int result = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return result != 0 ? result : said(cuStreamSynchronize(nullptr));
}
CUDART cudaMemsetAsync(void* to, int value, std::size_t bytes, void* stream) {
  return said(cuMemsetD8Async(address(to), static_cast<unsigned char>(value), bytes, stream));
}
CUDART cudaMemset(void* to, int value, std::size_t bytes) {
  int result = cudaMemsetAsync(to, value, bytes, nullptr);
  return result != 0 ? result : said(cuStreamSynchronize(nullptr));
}

CUDART cudaStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  return said(cuStreamCreateWithPriority(stream, flags, priority));
}
CUDART cudaStreamCreateWithFlags(void** stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
CUDART cudaStreamCreate(void** stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
CUDART cudaStreamDestroy(void* stream) { return said(cuStreamDestroy_v2(stream)); }
CUDART cudaStreamSynchronize(void* stream) { return said(cuStreamSynchronize(stream)); }
CUDART cudaStreamQuery(void* stream) { return said(cuStreamQuery(stream)); }
CUDART cudaStreamWaitEvent(void* stream, void* event, unsigned flags) {
  return said(cuStreamWaitEvent(stream, event, flags));
}
CUDART cudaStreamGetFlags(void* stream, unsigned* flags) {
  return said(cuStreamGetFlags(stream, flags));
}
CUDART cudaStreamGetPriority(void* stream, int* priority) {
  return said(cuStreamGetPriority(stream, priority));
}
CUDART cudaStreamIsCapturing(void* stream, int* status) {
  return said(cuStreamIsCapturing(stream, status));
}
CUDART cudaLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  return said(cuLaunchHostFunc(stream, function, data));
}

CUDART cudaEventCreateWithFlags(void** event, unsigned flags) {
  return said(cuEventCreate(event, flags));
}
CUDART cudaEventCreate(void** event) { return cudaEventCreateWithFlags(event, 0); }
CUDART cudaEventDestroy(void* event) { return said(cuEventDestroy_v2(event)); }
CUDART cudaEventRecord(void* event, void* stream) { return said(cuEventRecord(event, stream)); }
CUDART cudaEventRecordWithFlags(void* event, void* stream, unsigned) {
  return cudaEventRecord(event, stream);
}
CUDART cudaEventQuery(void* event) { return said(cuEventQuery(event)); }
CUDART cudaEventSynchronize(void* event) { return said(cuEventSynchronize(event)); }
CUDART cudaEventElapsedTime(float* milliseconds, void* begin, void* end) {
  return said(cuEventElapsedTime(milliseconds, begin, end));
}

CUDART cudaPointerGetAttributes(PointerAttributes* attributes, const void* pointer) {
  *attributes = {0, -2, nullptr, const_cast<void*>(pointer)};  // the host's own memory
  int type = 0, device = 0;
  if (cuPointerGetAttribute(&type, 2, address(pointer)) != 0) return 0;
  if (type == 2) cuPointerGetAttribute(&device, 9, address(pointer));
  void* any = const_cast<void*>(pointer);
  *attributes = {type, device, any, type == 1 ? any : nullptr};
  return 0;
}

// Kernels that a library was built with are machine code, which nothing here runs.
CUDART __cudaRegisterFatBinaryEnd(void**) { return 0; }
CUDART __cudaUnregisterFatBinary(void**) { return 0; }
CUDART __cudaRegisterFunction() { return 0; }
CUDART __cudaRegisterVar() { return 0; }
CUDART __cudaInitModule(void**) { return 1; }
extern "C" __attribute__((visibility("default"))) void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
