// SPDX-License-Identifier: Apache-2.0
// The arrays of a call that Python gets in place: `callgate.Buffer`, and the GPU call to which they
// may belong. The GIL is held.
//
// A Buffer borrows XLA's memory for the length of one call. Everything that it exports (NumPy
// arrays, DLPack capsules, memoryviews) holds a reference to it. After the call, its reference
// count therefore shows an escape, and it switches to a private copy. GPU memory is not copied:
// there the Buffer ends, and later accesses raise an error.
//
// On a GPU the handler has made the device's context current (src/xla/gate.cc). The returned value
// of a callable with style="return" is copied to XLA's memory. Arrays on the same GPU are copied
// there, on XLA's stream, which first waits for the array's own stream. All others go through
// pinned host memory. Nothing waits for the copies; their sources live until they have run. Only
// checksums(), a debugging function, waits for the GPU.
#pragma once

#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays/views.h"
#include "bindings/python/gil.h"
#include "core/array_view.h"
#include "core/call.h"
#include "core/lifetime.h"
#include "cuda/device.h"
#include "cuda/memory.h"

namespace callgate::bindings {

// CUDA's default streams, numbered as in DLPack.
inline constexpr std::int64_t kLegacyStream = 1, kThreadStream = 2;

struct DeviceCall {
  cuda::Device* device = nullptr;
  cuda::Stream stream = nullptr;
  // CUDA's default streams (bits 1 and 2, numbered as in DLPack) that may have work on the call's
  // or a Buffer's memory. Changes under the GIL.
  unsigned default_streams = 0;

  // From the call's context. Throws Error.
  static DeviceCall of(const CallContext& context) {
    auto stream = static_cast<cuda::Stream>(context.stream);
    return {.device = &cuda::Device::of(stream), .stream = stream};
  }

  // The stream's number in DLPack and CUDA's array interface: 1 for the legacy default stream.
  std::uintptr_t number() const noexcept { return stream == nullptr ? 1 : number_of(stream); }
  // Makes the device's context current again, after code that may have chosen another one.
  void make_current() const {
    cuda::check(cuda::driver().context_set_current(device->context()), "cuCtxSetCurrent");
  }
  // Both take a stream by that number, release the GIL meanwhile, and throw Error.
  void hold_back(std::int64_t consumer) const {  // the consumer waits for XLA's stream
    if (static_cast<std::uintptr_t>(consumer) == number()) return;
    without_gil([&] { cuda::StreamEvent(*device, stream).hold_back(of_number(consumer)); });
  }
  void wait_for(std::int64_t producer) const {  // XLA's stream waits for the producer
    if (static_cast<std::uintptr_t>(producer) == number()) return;
    without_gil([&] { cuda::StreamEvent(*device, of_number(producer)).hold_back(stream); });
  }
  void join_default_streams() const {  // for those with work
    for (std::int64_t producer : {kLegacyStream, kThreadStream})
      if ((default_streams & (1u << producer)) != 0) wait_for(producer);
  }
  static cuda::Stream of_number(std::int64_t number) {
    return reinterpret_cast<cuda::Stream>(static_cast<std::uintptr_t>(number));
  }
};

// This thread's running call, for adapters of array libraries (_arrays/gpu.py).
struct DeviceCallScope : Immovable {
  explicit DeviceCallScope(const DeviceCall* call) noexcept
      : before(std::exchange(current_, call)) {}
  ~DeviceCallScope() { current_ = before; }

  static inline thread_local const DeviceCall* current_ = nullptr;  // null for a host call
  const DeviceCall* before;
};

// A checksum of each array's content. On a GPU it waits for the stream's current work, without the
// GIL. Throws Error.
std::vector<std::size_t> checksums(std::span<const ArrayView> arrays, const DeviceCall* on_gpu);

// Keeps the sources of a call's copies alive. Releases them when XLA's stream has done its current
// work, on the thread that waits for it, without the GIL.
struct CopySources : Immovable {
  // `of_xla` are the call's own operands. Their memory outlives the stream's current work, so
  // returned ones need no view.
  CopySources(const DeviceCall& of, std::span<const ArrayView> operands)
      : call(of), of_xla(operands) {}
  ~CopySources();

  struct Kept {
    std::vector<LateReference> objects;
    std::vector<cuda::PinnedBlock> blocks;
  };
  const DeviceCall& call;
  const std::span<const ArrayView> of_xla;
  std::shared_ptr<Kept> kept = std::make_shared<Kept>();
};

// Copies `value` to the result's memory, or returns a description if it is another type of array.
// Arrays on the host are converted as by store().
std::optional<std::string> store_on_device(const ArrayView& target, PyObject* value, bool cast,
                                           CopySources& sources);

struct Buffer {
  // `on` for GPU memory, whose content is valid at the stream's current end.
  Buffer(const ArrayView& of, bool is_readonly, std::int64_t on_device, const DeviceCall* on)
      : dims(of.dims, of.dims + of.rank),
        byte_strides(dims.size(), bits(of.dtype) / 8),  // 0, and unused, for packed ones
        view(of),
        readonly(is_readonly),
        device(on_device) {
    if (on != nullptr) gpu = *on;
    view.dims = dims.data();
    for (std::size_t axis = dims.size(); axis-- > 1;)
      byte_strides[axis - 1] = byte_strides[axis] * std::max<std::int64_t>(dims[axis], 1);
  }
  // A Buffer with its own memory, which is ready.
  Buffer(const ArrayView& of, const DeviceCall& on, std::shared_ptr<DeviceMemory> kept)
      : Buffer(of, /*is_readonly=*/false, on.device->id(), &on) {
    memory = std::move(kept);
  }

  // Leaves XLA's memory: for a private copy, or for good on a GPU. Returns the old address.
  void* detach() {
    void* before = view.data;
    if (gpu) {
      view.data = nullptr;
      ended = true;
    } else {
      owned = std::make_unique<char[]>(view.nbytes() + 1);
      if (view.nbytes() != 0) std::memcpy(owned.get(), before, view.nbytes());
      view.data = owned.get();
    }
    return before;
  }

  std::vector<std::int64_t> dims, byte_strides;
  ArrayView view;
  bool readonly;
  std::int64_t device;            // its global id
  std::optional<DeviceCall> gpu;  // the GPU call of the memory
  bool ended = false;
  std::unique_ptr<char[]> owned;
  std::shared_ptr<DeviceMemory> memory;  // if set, consumers' streams need not wait

  // DLPack tensors over this memory that are still in use. A moved Buffer has none.
  Shared<int> exports{0};
};

// The C structs of the DLPack exchange protocol, versions 0 and 1, and the type codes that callgate
// uses. Layout and codes: https://dmlc.github.io/dlpack/latest/c_api.html
namespace dlpack {

using Device = nanobind::dlpack::device;
using DataType = nanobind::dlpack::dtype;
using Tensor = nanobind::dlpack::dltensor;

struct ManagedTensor {
  static constexpr const char* kName = "dltensor";  // of a capsule with an unused tensor
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

struct ManagedTensorVersioned {
  static constexpr const char* kName = "dltensor_versioned";
  std::uint32_t major, minor;
  void* context;
  void (*deleter)(ManagedTensorVersioned*);
  std::uint64_t flags;
  Tensor tensor;
};

inline constexpr std::int32_t kCpu = 1, kCuda = 2, kCudaManaged = 13;  // of Device
inline constexpr std::uint64_t kReadOnly = 1, kCopied = 2;             // flags

// The DLPack type of a dtype. Packed types have none, since DLPack doesn't define their layout.
inline std::optional<DataType> data_type(DType dtype) noexcept {
  const auto code = dlpack_code(dtype);
  if (!code) return std::nullopt;
  return DataType{*code, static_cast<std::uint8_t>(bits(dtype)), 1};
}

}  // namespace dlpack
}  // namespace callgate::bindings
