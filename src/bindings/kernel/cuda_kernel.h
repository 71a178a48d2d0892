// What Python makes of kernels for CUDA: `CudaKernel`, `Nvrtc`, and what devices there are.
#pragma once

#include "bindings/python/python.h"

namespace callgate::bindings {

void bind_cuda_kernel(nb::module_& module);

}  // namespace callgate::bindings
