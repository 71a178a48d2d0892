// `callgate.Buffer`: an array of the running call that every consumer library can read in place.
//
// A Buffer borrows XLA's memory for the length of one call. All that it hands out (NumPy arrays,
// DLPack capsules, memoryviews) holds a reference to it, so its own reference count tells, when the
// call is over, whether anything escaped; then it takes a copy and goes on from there.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "bindings/python.h"
#include "core/array_view.h"

namespace callgate::bindings {

class Buffer {
 public:
  Buffer(const ArrayView& view, bool readonly, std::int64_t device);

  const ArrayView& view() const noexcept { return view_; }
  bool readonly() const noexcept { return readonly_; }
  std::int64_t device() const noexcept { return device_; }
  const std::vector<std::int64_t>& dims() const noexcept { return dims_; }
  const std::vector<std::int64_t>& strides() const noexcept { return strides_; }
  const std::vector<std::int64_t>& byte_strides() const noexcept { return byte_strides_; }

  // DLPack tensors over this memory that are still in use. Changes under the GIL.
  int exports = 0;

  // Leaves XLA's memory for a private copy. Returns where the data was.
  void* detach();

 private:
  std::vector<std::int64_t> dims_, strides_, byte_strides_;
  ArrayView view_;
  bool readonly_;
  std::int64_t device_;
  std::unique_ptr<char[]> owned_;
};

// A new Python Buffer, or null with a Python error.
PyObject* make_buffer(const ArrayView& view, bool writable, std::int64_t device);

void bind_buffer(nb::module_& module);

}  // namespace callgate::bindings
