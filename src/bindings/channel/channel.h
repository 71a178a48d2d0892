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

// The forms in which a Python function gets the records of one source, as copies that it may keep.
// `source` is (id, name, role, description, has lanes).
enum class Form {
  kRows,     // function(source, [(lane, seq, time_ns, device, run, flags, arrays), ...])
  kStacked,  // function(source, (lane, seq, time_ns, device, run, flags), arrays), all stacked
};

// A Python function as a consumer. It deals with exceptions of user code itself; one that leaves it
// is reported as unraisable. `control`, if not None, is called with "flush" and "close".
std::shared_ptr<Consumer> make_py_consumer(nb::object function, Form form, nb::object control);

void bind_channel(nb::module_& module);  // `Consumer`, `Channel`, `Tap`: before the others
void bind_sinks(nb::module_& module);    // `jsonl_sink`, ..., `RecordWriter`
void bind_stream(nb::module_& module);   // `stream_sink`, `StreamReader`, outfeeds of 2020

}  // namespace callgate::bindings
