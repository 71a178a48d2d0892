// The very end of the process, after Python's: what came too late is reported, and failures that
// were found at the end make the exit status say so.
#pragma once

#include "bindings/python/python.h"

namespace callgate::bindings {

void bind_exit(nb::module_& module);

}  // namespace callgate::bindings
