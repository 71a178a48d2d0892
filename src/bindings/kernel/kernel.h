// What becomes of the failures of kernels, for the CPU and for CUDA.
#pragma once

#include <string>

#include "core/kernel_callee.h"

namespace callgate::bindings {

// Text for XLA about a call of the kernel that failed, by way of the hook, which makes the
// exception and keeps it. Without Python, which may be gone, the message itself.
KernelCalleeBase::Describe failures_of(std::string kernel);

// Keeps a failure that XLA can't be told of.
void defer_kernel_failure(const Error& error);

}  // namespace callgate::bindings
