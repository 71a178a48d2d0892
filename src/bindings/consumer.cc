// See the header.
#include "bindings/consumer.h"

#include <nanobind/stl/string.h>

namespace callgate::bindings {

void bind_consumer(nb::module_& module) {
  nb::class_<ConsumerHandle>(module, "Consumer", "A native consumer of a channel's records.")
      .def("__repr__",
           [](const ConsumerHandle& handle) {
             return "<native consumer: " + handle.consumer->description() + ">";
           })
      .def(
          "close", [](const ConsumerHandle& handle) { handle.consumer->close(); },
          nb::call_guard<nb::gil_scoped_release>(),
          "No record follows; after it was removed from its channel.");
}

}  // namespace callgate::bindings
