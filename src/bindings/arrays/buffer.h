// `callgate.Buffer`: an array of the running call that every consumer library can read in place.
//
// A Buffer borrows XLA's memory for the length of one call. All that it hands out (NumPy arrays,
// DLPack capsules, memoryviews) holds a reference to it, so its own reference count tells, when the
// call is over, whether anything escaped; then it takes a copy and goes on from there. Memory of a
// GPU is not copied: there the Buffer ends, and whoever asks it for the memory gets an error.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/arrays/device.h"
#include "bindings/python/python.h"
#include "core/array_view.h"

namespace callgate::bindings {

class Buffer {
 public:
  // `gpu` for memory of a GPU, whose contents are those at the stream's present end.
  Buffer(const ArrayView& view, bool readonly, std::int64_t device, const DeviceCall* gpu);
  // Of memory of its own, which is ready.
  Buffer(const ArrayView& view, const DeviceCall& gpu, std::shared_ptr<DeviceMemory> memory);

  const ArrayView& view() const noexcept { return view_; }
  bool readonly() const noexcept { return readonly_; }
  std::int64_t device() const noexcept { return device_; }
  const std::vector<std::int64_t>& dims() const noexcept { return dims_; }
  const std::vector<std::int64_t>& strides() const noexcept { return strides_; }
  const std::vector<std::int64_t>& byte_strides() const noexcept { return byte_strides_; }

  // The call on a GPU that the memory belongs to; null for memory of the host.
  const DeviceCall* gpu() const noexcept { return gpu_ ? &*gpu_ : nullptr; }
  // "cpu:3" by the device's global id, "cuda:1" by the driver's number.
  std::string device_text() const;
  // Throws where the memory has gone back to XLA.
  void check_alive() const;
  // Whether a consumer's stream has nothing to wait for.
  bool ready() const noexcept { return memory_ != nullptr; }

  // Which of CUDA's default streams (bits 1 and 2, as DLPack numbers them) may have been given work
  // on the memory. Changes under the GIL.
  unsigned default_streams = 0;

  // DLPack tensors over this memory that are still in use. Changes under the GIL.
  int exports = 0;

  // Leaves XLA's memory: for a private copy, or for good where it is a GPU's. Returns where the
  // data was.
  void* detach();

 private:
  std::vector<std::int64_t> dims_, strides_, byte_strides_;
  ArrayView view_;
  bool readonly_;
  std::int64_t device_;
  std::optional<DeviceCall> gpu_;
  bool ended_ = false;
  std::unique_ptr<char[]> owned_;
  std::shared_ptr<DeviceMemory> memory_;
};

// A new Python Buffer, or null with a Python error. `gpu` as Buffer's.
PyObject* make_buffer(const ArrayView& view, bool writable, std::int64_t device,
                      const DeviceCall* gpu);

// Throws for types of which several elements are in a byte; `what` is the method that was called.
void refuse_packed(const Buffer& buffer, const char* what);

nb::tuple shape_of(const Buffer& buffer);

// NumPy's dtype of the elements. Throws where it has none.
nb::object dtype_of(const Buffer& buffer);

// Adds to the Python type how other libraries get at the memory: DLPack, on the host and on GPUs,
// and CUDA's array interface.
void bind_buffer_exchange(nb::class_<Buffer>& type);

}  // namespace callgate::bindings
