// The FFI handlers of kernels in programs for CUDA: launches on XLA's stream, by name.
//
// `callgate.kernel` may be captured into CUDA graphs, whose replays then launch without the host.
// `callgate.kernel.scratch` may not: it is for calls with scratch memory, which a graph's replays
// would no longer own, and for calls on shards that not every device makes.
#pragma once

#include <string_view>

#include "xla/ffi.h"

namespace callgate::xla_ffi {

inline constexpr std::string_view kKernelScratchTarget = "callgate.kernel.scratch";

XLA_FFI_Error* cuda_kernel_instantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* cuda_kernel_execute(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* cuda_kernel_scratch_execute(XLA_FFI_CallFrame* frame);

}  // namespace callgate::xla_ffi
