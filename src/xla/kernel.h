// The FFI handlers of the target `callgate.kernel`: a call of native code by name.
//
// As those of gates (xla/gate.h), with less on the way: no thread of its own, no Python, nothing to
// drain at exit.
#pragma once

#include <string_view>

#include "xla/ffi.h"

namespace callgate::xla_ffi {

inline constexpr std::string_view kKernelTarget = "callgate.kernel";

XLA_FFI_Error* kernel_instantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* kernel_execute(XLA_FFI_CallFrame* frame);

}  // namespace callgate::xla_ffi
