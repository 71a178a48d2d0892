// Streams for Python: the sinks that write them as `_callgate.Consumer`s, and their readers.
#pragma once

#include "bindings/python/python.h"

namespace callgate::bindings {

// Binds stream_sink, StreamReader, outfeed_2020_sink, read_outfeed_2020 and outfeed_2020_header;
// after bind_consumer.
void bind_stream(nb::module_& module);

}  // namespace callgate::bindings
