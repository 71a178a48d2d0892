// Ctrl-C in Python's terms, for core/interrupt.h.
#pragma once

#include "bindings/python/python.h"

namespace callgate::bindings {

void bind_interrupt(nb::module_& module);

}  // namespace callgate::bindings
