// Native kernels as Python defines them: the class `Kernel`, and what reads a library's table.
#pragma once

#include "bindings/python.h"

namespace callgate::bindings {

void bind_kernel(nb::module_& module);

}  // namespace callgate::bindings
