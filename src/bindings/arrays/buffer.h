// SPDX-License-Identifier: Apache-2.0
// The arrays of a call as Python gets them in place: `callgate.Buffer`, and the call on a GPU that
// they may belong to. The GIL is held.
//
// A Buffer borrows XLA's memory for the length of one call. All that it hands out (NumPy arrays,
// DLPack capsules, memoryviews) holds a reference to it, so its own reference count tells, when the
// call is over, whether anything escaped; then it takes a copy and goes on from there. Memory of a
// GPU is not copied: there the Buffer ends, and whoever asks it for the memory gets an error.
//
// On a GPU the handler has made the device's context current (src/xla/gate.cc), and what a
// callable with style="return" gives back is copied to XLA's memory: arrays on the same GPU there,
// on XLA's stream, which first waits for the stream that they were made in; all others through
// pinned memory of the host. Nobody waits for the copies: what they read lives until they have run.
// Nothing here waits for the GPU but checksums(), which debugging alone asks for.
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

// CUDA's default streams, as DLPack numbers them.
inline constexpr std::int64_t kLegacyStream = 1, kThreadStream = 2;

struct DeviceCall {
  cuda::Device* device = nullptr;
  cuda::Stream stream = nullptr;
  // Which of CUDA's default streams (bits 1 and 2, as DLPack numbers them) may have been given work
  // on the call's memory, or that of a Buffer. Changes under the GIL.
  unsigned default_streams = 0;

  // The call's, from its context. Throws Error.
  static DeviceCall of(const CallContext& context) {
    auto stream = static_cast<cuda::Stream>(context.stream);
    return {.device = &cuda::Device::of(stream), .stream = stream};
  }

  // The stream as DLPack and CUDA's array interface number it: 1 for the legacy default stream.
  std::uintptr_t number() const noexcept { return stream == nullptr ? 1 : number_of(stream); }
  // Makes the device's context the thread's again, after code that may have chosen another one.
  void make_current() const {
    cuda::check(cuda::driver().context_set_current(device->context()), "cuCtxSetCurrent");
  }
  // Both take a stream by that number, release the GIL meanwhile, and throw Error.
  void hold_back(std::int64_t consumer) const {  // it waits for XLA's stream
    if (static_cast<std::uintptr_t>(consumer) == number()) return;
    without_gil([&] { cuda::StreamEvent(*device, stream).hold_back(of_number(consumer)); });
  }
  void wait_for(std::int64_t producer) const {  // XLA's stream waits for it
    if (static_cast<std::uintptr_t>(producer) == number()) return;
    without_gil([&] { cuda::StreamEvent(*device, of_number(producer)).hold_back(stream); });
  }
  void join_default_streams() const {  // for those that may have been given work
    for (std::int64_t producer : {kLegacyStream, kThreadStream})
      if ((default_streams & (1u << producer)) != 0) wait_for(producer);
  }
  static cuda::Stream of_number(std::int64_t number) {
    return reinterpret_cast<cuda::Stream>(static_cast<std::uintptr_t>(number));
  }
};

// The call that runs on this thread, for adapters of array libraries (_arrays/gpu.py).
struct DeviceCallScope : Immovable {
  explicit DeviceCallScope(const DeviceCall* call) noexcept
      : before(std::exchange(current_, call)) {}
  ~DeviceCallScope() { current_ = before; }

  static inline thread_local const DeviceCall* current_ = nullptr;  // null for one on the host
  const DeviceCall* before;
};

// A number for the contents of each array; on a GPU, once its stream has come this far: that is
// waited for, without the GIL. Throws Error.
std::vector<std::size_t> checksums(std::span<const ArrayView> arrays, const DeviceCall* on_gpu);

// Holds the sources of a call's copies. Lets go of them once XLA's stream has come this far, on the
// thread that waits for that, without the GIL.
struct CopySources : Immovable {
  // `of_xla` are the call's own operands: their memory is there for all that the stream is given
  // now, and who has returned one of them keeps none of its views.
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

// Copies `value` to the result's memory, or returns what it is, where that is another type of
// array. Arrays on the host are converted as by store().
std::optional<std::string> store_on_device(const ArrayView& target, PyObject* value, bool cast,
                                           CopySources& sources);

struct Buffer {
  // `on` for memory of a GPU, whose contents are those at the stream's present end.
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
  // A Buffer of memory of its own, which is ready.
  Buffer(const ArrayView& of, const DeviceCall& on, std::shared_ptr<DeviceMemory> kept)
      : Buffer(of, /*is_readonly=*/false, on.device->id(), &on) {
    memory = std::move(kept);
  }

  // Leaves XLA's memory: for a private copy, or for good where it is a GPU's. Returns where the
  // data was.
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
  std::optional<DeviceCall> gpu;  // the call on a GPU that the memory belongs to
  bool ended = false;
  std::unique_ptr<char[]> owned;
  std::shared_ptr<DeviceMemory> memory;  // where it is, a consumer's stream has nothing to wait for

  // DLPack tensors over this memory that are still in use. Changes under the GIL.
  int exports = 0;
};

// The C structs of the DLPack exchange protocol, versions 0 and 1, and the type codes callgate
// uses. Source of layout and codes: https://dmlc.github.io/dlpack/latest/c_api.html
namespace dlpack {

using Device = nanobind::dlpack::device;
using DataType = nanobind::dlpack::dtype;
using Tensor = nanobind::dlpack::dltensor;

struct ManagedTensor {
  static constexpr const char* kName = "dltensor";  // of a capsule that nobody has taken it from
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

// The DLPack type of a dtype; empty for packed ones, whose layout DLPack leaves open.
inline std::optional<DataType> data_type(DType dtype) noexcept {
  const auto code = dlpack_code(dtype);
  if (!code) return std::nullopt;
  return DataType{*code, static_cast<std::uint8_t>(bits(dtype)), 1};
}

}  // namespace dlpack
}  // namespace callgate::bindings
