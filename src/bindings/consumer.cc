// See the header.
#include "bindings/consumer.h"

#include <nanobind/stl/string.h>

namespace callgate::bindings {

void bind_consumer(nb::module_& module) {
  nb::class_<ConsumerHandle>(module, "Consumer", "A native consumer of a channel's records.")
      .def("__repr__", [](const ConsumerHandle& handle) {
        return "<native consumer: " + handle.consumer->description() + ">";
      });
}

}  // namespace callgate::bindings
