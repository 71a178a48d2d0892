// The native sinks as Python makes them, reads them, and writes records of its own to them.
#pragma once

#include "bindings/python/python.h"

namespace callgate::bindings {

// `jsonl_sink`, `npy_sink`, `stats_sink`, `StatsReader` and `RecordWriter`. After bind_consumer.
void bind_sinks(nb::module_& module);

}  // namespace callgate::bindings
