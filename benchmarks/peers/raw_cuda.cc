// SPDX-License-Identifier: Apache-2.0
// The floor on a GPU: what a launch costs in the driver alone and in a hand-written FFI handler,
// and what copies the driver makes of pinned and device memory.
//
// Loads the driver's library itself, so that it compiles without CUDA. One device, whose primary
// context is XLA's too; `bench_cuda_load` comes first, from one thread. Functions return null, or
// what failed. Built on demand by `raw_cuda.py`; symbols are looked up through ctypes.
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// Does nothing with its two pointers.
constexpr char kEmpty[] = R"(
.version 6.4
.target sm_75
.address_size 64
.visible .entry bench_empty(.param .u64 x, .param .u64 z) { ret; }
)";

using Address = std::uint64_t;

struct Driver {
  int (*init)(unsigned);
  int (*version)(int*);
  int (*retain)(void**, int);
  int (*set_current)(void*);
  int (*load)(void**, const void*);
  int (*function)(void**, void*, const char*);
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                void**, void**);
  int (*stream_create)(void**, unsigned);
  int (*stream_wait)(void*);
  int (*alloc)(Address*, std::size_t);
  int (*release)(Address);
  int (*alloc_host)(void**, std::size_t, unsigned);
  int (*release_host)(void*);
  int (*to_host)(void*, Address, std::size_t, void*);
  int (*to_device)(Address, const void*, std::size_t, void*);
  int (*on_device)(Address, Address, std::size_t, void*);
};

Driver driver;
void* context = nullptr;
void* empty = nullptr;
void* stream = nullptr;
Address memory[2] = {};
void* pinned = nullptr;
std::string failure;

const char* failed(const char* what, int result) {
  failure = std::string(what) + " failed with " + std::to_string(result);
  return failure.c_str();
}

#define BENCH_TRY(call) \
  if (int result = (call); result != 0) return failed(#call, result)

template <class F>
bool find(void* library, const char* symbol, F& function) {
  function = reinterpret_cast<F>(dlsym(library, symbol));
  return function != nullptr;
}

bool find_all(void* library) {
  Driver& d = driver;
  return find(library, "cuInit", d.init) && find(library, "cuDriverGetVersion", d.version) &&
         find(library, "cuDevicePrimaryCtxRetain", d.retain) &&
         find(library, "cuCtxSetCurrent", d.set_current) &&
         find(library, "cuModuleLoadData", d.load) &&
         find(library, "cuModuleGetFunction", d.function) &&
         find(library, "cuLaunchKernel", d.launch) &&
         find(library, "cuStreamCreate", d.stream_create) &&
         find(library, "cuStreamSynchronize", d.stream_wait) &&
         find(library, "cuMemAlloc_v2", d.alloc) && find(library, "cuMemFree_v2", d.release) &&
         find(library, "cuMemHostAlloc", d.alloc_host) &&
         find(library, "cuMemFreeHost", d.release_host) &&
         find(library, "cuMemcpyDtoHAsync_v2", d.to_host) &&
         find(library, "cuMemcpyHtoDAsync_v2", d.to_device) &&
         find(library, "cuMemcpyDtoDAsync_v2", d.on_device);
}

int launch_empty(void* on, void* x, void* z) {
  void* parameters[] = {&x, &z};
  return driver.launch(empty, 1, 1, 1, 32, 1, 1, 0, on, parameters, nullptr);
}

ffi::Error Launch(void* on, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> z) {
  if (launch_empty(on, x.untyped_data(), z->untyped_data()) == 0) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal, "cuLaunchKernel failed");
}

}  // namespace

// Version is 1000 * major + 10 * minor of CUDA.
extern "C" const char* bench_cuda_load(int ordinal, int* version) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr || !find_all(library)) return "there is no driver, or it lacks a function";
  BENCH_TRY(driver.init(0));
  BENCH_TRY(driver.version(version));
  BENCH_TRY(driver.retain(&context, ordinal));
  BENCH_TRY(driver.set_current(context));
  void* module = nullptr;
  BENCH_TRY(driver.load(&module, kEmpty));
  BENCH_TRY(driver.function(&empty, module, "bench_empty"));
  BENCH_TRY(driver.stream_create(&stream, 1));
  return nullptr;
}

extern "C" const char* bench_cuda_launches(int count) {
  BENCH_TRY(driver.set_current(context));
  for (int i = 0; i < count; ++i) BENCH_TRY(launch_empty(stream, nullptr, nullptr));
  BENCH_TRY(driver.stream_wait(stream));
  return nullptr;
}

// Room for copies of so many bytes; what was there is given back.
extern "C" const char* bench_cuda_room(std::size_t bytes) {
  BENCH_TRY(driver.set_current(context));
  for (Address& each : memory) {
    if (each != 0) BENCH_TRY(driver.release(each));
    each = 0;
    if (bytes != 0) BENCH_TRY(driver.alloc(&each, bytes));
  }
  if (pinned != nullptr) BENCH_TRY(driver.release_host(pinned));
  pinned = nullptr;
  if (bytes != 0) BENCH_TRY(driver.alloc_host(&pinned, bytes, 0));
  return nullptr;
}

// `way` is 0 to the host, 1 to the host and back, 2 on the device.
extern "C" const char* bench_cuda_copies(std::size_t bytes, int way, int count) {
  BENCH_TRY(driver.set_current(context));
  for (int i = 0; i < count; ++i) {
    if (way == 2) BENCH_TRY(driver.on_device(memory[1], memory[0], bytes, stream));
    if (way != 2) BENCH_TRY(driver.to_host(pinned, memory[0], bytes, stream));
    if (way == 1) BENCH_TRY(driver.to_device(memory[1], pinned, bytes, stream));
  }
  BENCH_TRY(driver.stream_wait(stream));
  return nullptr;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    bench_cuda_launch, Launch,
    ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    bench_cuda_launch_graph, Launch,
    ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>(),
    {ffi::Traits::kCmdBufferCompatible});
