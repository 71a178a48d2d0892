// See the header.
#include "bindings/channel/consumer.h"

#include <nanobind/stl/string.h>

#include "bindings/python/gil.h"

namespace callgate::bindings {

void bind_consumer(nb::module_& module) {
  nb::class_<ConsumerHandle>(module, "Consumer", "A native consumer of a channel's records.")
      .def("__repr__",
           [](const ConsumerHandle& handle) {
             return "<native consumer: " + handle.consumer->description() + ">";
           })
      .def(
          "close",
          [](const ConsumerHandle& handle) { without_gil([&] { handle.consumer->close(); }); },
          "No record follows; after it was removed from its channel.");
}

}  // namespace callgate::bindings
