// The board of progress bars, for the Python thread that draws them.
#pragma once

#include "bindings/python/python.h"

namespace callgate::bindings {

void bind_progress(nb::module_& module);

}  // namespace callgate::bindings
