// The arrays of a call as Python gets them in place: `callgate.Buffer`, and the call on a GPU that
// they may belong to. The GIL is held.
//
// A Buffer borrows XLA's memory for the length of one call. All that it hands out (NumPy arrays,
// DLPack capsules, memoryviews) holds a reference to it, so its own reference count tells, when the
// call is over, whether anything escaped; then it takes a copy and goes on from there. Memory of a
// GPU is not copied: there the Buffer ends, and whoever asks it for the memory gets an error.
//
// On a GPU the handler has made the device's context current (src/xla/cuda_gate.cc), and what a
// callable with style="return" gives back is copied to XLA's memory: arrays on the same GPU there,
// on XLA's stream, which first waits for the stream that they were made in; all others through
// pinned memory of the host. Nobody waits for the copies: what they read lives until they have run.
// Nothing here waits for the GPU but checksums(), which debugging alone asks for.
#pragma once

#include <algorithm>
#include <cstdint>
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

struct DeviceCall {
  cuda::Device* device = nullptr;
  cuda::Stream stream = nullptr;

  // The call's, from its context. Throws Error.
  static DeviceCall of(const CallContext& context) {
    auto stream = static_cast<cuda::Stream>(context.stream);
    return {&cuda::Device::of(stream), stream};
  }

  // The stream as DLPack and CUDA's array interface number it: 1 for the legacy default stream.
  std::uintptr_t number() const noexcept { return stream == nullptr ? 1 : number_of(stream); }
  // Makes the device's context the thread's again, after code that may have chosen another one.
  void make_current() const {
    cuda::check(cuda::driver().context_set_current(device->context()), "cuCtxSetCurrent");
  }
  // Both take a stream by that number, release the GIL meanwhile, and throw Error.
  void hold_back(std::int64_t consumer) const;  // it waits for XLA's stream
  void wait_for(std::int64_t producer) const;   // XLA's stream waits for it
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

// What the copies of one call read. Lets go of it once XLA's stream has come this far, on the
// thread that waits for that, without the GIL.
struct CopySources : Immovable {
  // `of_xla` are the call's own operands: their memory is there for all that the stream is given
  // now, and who has returned one of them keeps none of its views.
  CopySources(const DeviceCall& of, std::span<const ArrayView> operands)
      : call(of), of_xla(operands) {}
  ~CopySources();

  bool is_of_xla(const void* data) const noexcept {
    return std::ranges::any_of(of_xla, [data](const ArrayView& view) {
      const auto* first = static_cast<const char*>(view.data);
      return data >= first && data < first + view.nbytes();
    });
  }

  struct Kept {
    std::vector<LateReference> objects;
    std::vector<cuda::PinnedBlock> blocks;
  };
  const DeviceCall& call;
  const std::span<const ArrayView> of_xla;
  std::shared_ptr<Kept> kept = std::make_shared<Kept>();
};

// Copies `value` to the result's memory. For kMismatch, `got` may say what came. `cast` allows
// same-kind casts of arrays on the host.
Stored store_on_device(const ArrayView& target, PyObject* value, bool cast, CopySources& sources,
                       std::string& got);

struct Buffer {
  // `on` for memory of a GPU, whose contents are those at the stream's present end.
  Buffer(const ArrayView& of, bool is_readonly, std::int64_t on_device, const DeviceCall* on);
  // Of memory of its own, which is ready.
  Buffer(const ArrayView& of, const DeviceCall& on, std::shared_ptr<DeviceMemory> kept)
      : Buffer(of, /*is_readonly=*/false, on.device->id(), &on) {
    memory = std::move(kept);
  }

  // "cpu:3" by the device's global id, "cuda:1" by the driver's number.
  std::string device_text() const;
  // Throws where the memory has gone back to XLA.
  void check_alive() const;
  // Throws for types of which several elements are in a byte; `what` is the method that was called.
  void refuse_packed(const char* what) const;
  nb::tuple shape() const { return tuple_of(dims); }
  // NumPy's dtype of the elements. Throws where it has none.
  nb::object dtype() const;
  // Leaves XLA's memory: for a private copy, or for good where it is a GPU's. Returns where the
  // data was.
  void* detach();

  std::vector<std::int64_t> dims, byte_strides;
  ArrayView view;
  bool readonly;
  std::int64_t device;            // its global id
  std::optional<DeviceCall> gpu;  // the call on a GPU that the memory belongs to
  bool ended = false;
  std::unique_ptr<char[]> owned;
  std::shared_ptr<DeviceMemory> memory;  // where it is, a consumer's stream has nothing to wait for

  // Which of CUDA's default streams (bits 1 and 2, as DLPack numbers them) may have been given work
  // on the memory. Changes under the GIL.
  unsigned default_streams = 0;
  // DLPack tensors over this memory that are still in use. Changes under the GIL.
  int exports = 0;
};

// The struct-module letter of a type, for Python's buffer protocol; null where it has none, as all
// have none that are not NumPy's own.
const char* format_of(DType dtype) noexcept;

// Adds to the Python type how other libraries get at the memory: DLPack, on the host and on GPUs,
// and CUDA's array interface.
void bind_buffer_exchange(nb::class_<Buffer>& type);

// Throws one of nanobind's exceptions, which copy the text.
[[noreturn]] inline void refuse(nb::builtin_exception (*make)(const char*),
                                const std::string& text) {
  throw make(text.c_str());
}

}  // namespace callgate::bindings
