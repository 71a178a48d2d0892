// SPDX-License-Identifier: Apache-2.0
// A consumer's references, for Python's cycle collector: its function may refer to its own tap,
// program or channel. Only valid while the asking Python object is the consumer's one owner,
// because the collector can't follow references of a channel or an executable. Under the GIL.
#pragma once

#include "bindings/python/gil.h"
#include "channel/consumer.h"

namespace callgate::bindings {

// Visits the references of a Python consumer. `consumer` may be null, or a native one.
int visit_consumer(const Consumer* consumer, visitproc visit, void* arg);

// Drops its references. Afterwards it accepts no record.
void clear_consumer(Consumer* consumer);

}  // namespace callgate::bindings
