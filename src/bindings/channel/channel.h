// Channels and taps as Python holds them.
#pragma once

#include "bindings/python/python.h"

namespace callgate::bindings {

void bind_channel(nb::module_& module);

}  // namespace callgate::bindings
