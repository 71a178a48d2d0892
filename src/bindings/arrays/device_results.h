// What a callable with style="return" gives back, copied to XLA's memory on a GPU.
//
// Arrays on the same GPU are copied there, on XLA's stream, which first waits for the stream that
// they were made in; all others go through pinned memory of the host. Nobody waits for the copies:
// what they read lives until they have run. The GIL is held.
#pragma once

#include <string>
#include <vector>

#include "bindings/arrays/device_call.h"
#include "bindings/arrays/views.h"
#include "bindings/python/python.h"
#include "cuda/memory.h"

namespace callgate::bindings {

// What the copies of one call read.
class CopySources {
 public:
  explicit CopySources(const DeviceCall& call) : call_(call) {}
  ~CopySources();  // lets go of all of it once XLA's stream has come this far
  CopySources(const CopySources&) = delete;
  CopySources& operator=(const CopySources&) = delete;

  void keep(nb::object object) { objects_.push_back(object.release().ptr()); }
  void keep(cuda::PinnedBlock block) { blocks_.push_back(std::move(block)); }

 private:
  const DeviceCall& call_;
  std::vector<PyObject*> objects_;
  std::vector<cuda::PinnedBlock> blocks_;
};

// Copies `value` to the result's memory. For kMismatch, `got` says what came. `cast` allows
// same-kind casts of arrays on the host.
Stored store_on_device(const ArrayView& target, PyObject* value, bool cast, const DeviceCall& call,
                       CopySources& sources, std::string& got);

}  // namespace callgate::bindings
