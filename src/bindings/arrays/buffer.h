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
#include "bindings/python/gil.h"
#include "core/array_view.h"

namespace callgate::bindings {

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
  nb::tuple shape() const;
  // NumPy's dtype of the elements. Throws where it has none.
  nb::object dtype() const;
  // Leaves XLA's memory: for a private copy, or for good where it is a GPU's. Returns where the
  // data was.
  void* detach();

  std::vector<std::int64_t> dims, strides, byte_strides;
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

// A new Python Buffer, or null with a Python error.
PyObject* make_buffer(const ArrayView& view, bool writable, std::int64_t device,
                      const DeviceCall* gpu);

// Adds to the Python type how other libraries get at the memory: DLPack, on the host and on GPUs,
// and CUDA's array interface.
void bind_buffer_exchange(nb::class_<Buffer>& type);

// Throws one of nanobind's exceptions, which copy the text.
[[noreturn]] inline void refuse(nb::builtin_exception (*make)(const char*),
                                const std::string& text) {
  throw make(text.c_str());
}

}  // namespace callgate::bindings
