// A native consumer of records as Python holds it: what `_callgate.Consumer` is.
#pragma once

#include <memory>

#include "bindings/python/python.h"
#include "channel/consumer.h"

namespace callgate::bindings {

struct ConsumerHandle {
  std::shared_ptr<Consumer> consumer;
};

// The class `Consumer`; what makes one (a sink's factory) is bound beside the sink.
void bind_consumer(nb::module_& module);

}  // namespace callgate::bindings
