// Channels, taps, consumers, sinks and streams as Python holds them.
#pragma once

#include <memory>

#include "bindings/python/gil.h"
#include "channel/consumer.h"

namespace callgate::bindings {

// A native consumer of records: what `_callgate.Consumer` is.
struct ConsumerHandle {
  std::shared_ptr<Consumer> consumer;
};

void bind_py_consumer(nb::module_& module);  // `python_consumer`
void bind_channel(nb::module_& module);      // `Consumer`, `Channel`, `Tap`: before the others
void bind_sinks(nb::module_& module);        // `jsonl_sink`, ..., `RecordWriter`
void bind_stream(nb::module_& module);       // `stream_sink`, `StreamReader`, outfeeds of 2020

}  // namespace callgate::bindings
