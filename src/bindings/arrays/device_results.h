// What a callable with style="return" gives back, copied to XLA's memory on a GPU.
//
// Arrays on the same GPU are copied there, on XLA's stream, which first waits for the stream that
// they were made in; all others go through pinned memory of the host. Nobody waits for the copies:
// what they read lives until they have run. The GIL is held.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays/device_call.h"
#include "bindings/arrays/views.h"
#include "bindings/python/deferred.h"
#include "bindings/python/python.h"
#include "core/lifetime.h"
#include "cuda/memory.h"

namespace callgate::bindings {

// What the copies of one call read.
class CopySources : Immovable {
 public:
  explicit CopySources(const DeviceCall& call) : call_(call) {}
  ~CopySources();  // lets go of all of it once XLA's stream has come this far

  void keep(nb::object object) { kept_->objects.push_back(object.release().ptr()); }
  void keep(cuda::PinnedBlock block) { kept_->blocks.push_back(std::move(block)); }

 private:
  // Dies on the thread that waits for the stream, without the GIL.
  struct Kept : Immovable {
    std::vector<PyObject*> objects;
    std::vector<cuda::PinnedBlock> blocks;
    ~Kept() {
      for (PyObject* object : objects) release_later(object);
    }
  };

  const DeviceCall& call_;
  std::shared_ptr<Kept> kept_ = std::make_shared<Kept>();
};

// Copies `value` to the result's memory. For kMismatch, `got` says what came. `cast` allows
// same-kind casts of arrays on the host.
Stored store_on_device(const ArrayView& target, PyObject* value, bool cast, const DeviceCall& call,
                       CopySources& sources, std::string& got);

}  // namespace callgate::bindings
