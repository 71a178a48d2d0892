// Native kernels as Python defines them: the class `Kernel`, and what reads a library's table.
#pragma once

#include <string>

#include "bindings/python/python.h"
#include "core/error.h"

namespace callgate::bindings {

// Text for XLA about a call that failed, by way of the hook, which makes the exception and keeps
// it. Without Python, which may be gone, the message itself.
std::string describe_kernel_failure(const std::string& kernel, const std::string& said,
                                    const std::string& site);

// Keeps a failure that could not be returned to XLA.
void defer_kernel_failure(const Failure& failure);

void bind_kernel(nb::module_& module);

}  // namespace callgate::bindings
