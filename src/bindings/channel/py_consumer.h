// Python functions as consumers of a channel.
//
// Both forms get the records of one source at a time, as copies that they may keep. The function
// deals with exceptions of user code itself; one that leaves it is reported as unraisable.
#pragma once

#include <memory>

#include "bindings/python/python.h"
#include "channel/consumer.h"

namespace callgate::bindings {

enum class Form {
  kRows,     // function(source, [(lane, seq, time_ns, device, run, flags, arrays), ...])
  kStacked,  // function(source, (lane, seq, time_ns, device, run, flags), arrays), all stacked
};
// `source` is (id, name, role, description, has lanes).

// `control`, if not None, is called with "flush" and "close".
std::shared_ptr<Consumer> make_py_consumer(nb::object function, Form form, nb::object control);

}  // namespace callgate::bindings
