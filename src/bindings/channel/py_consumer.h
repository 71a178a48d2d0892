// SPDX-License-Identifier: Apache-2.0
// A consumer's references, for Python's cycle collector: its function may refer to its own tap,
// program or channel. Only while one owner has the consumer, the Python object that asks: a
// channel's or an executable's reference is not Python's to follow. Under the GIL.
#pragma once

#include "bindings/python/gil.h"
#include "channel/consumer.h"

namespace callgate::bindings {

// Visits what a consumer in Python refers to. `consumer` may be null, or a native one.
int visit_consumer(const Consumer* consumer, visitproc visit, void* arg);

// Drops what it refers to. It takes no record from then on.
void clear_consumer(Consumer* consumer);

}  // namespace callgate::bindings
