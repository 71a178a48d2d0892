// The FFI handlers of the targets `callgate.gate` and `callgate.tap`: a call by name of whatever
// the name stands for. Taps have a target of their own, since they are partitioned in another way.
//
// Instantiate runs once per call site and executable, also when one is loaded from a cache: it
// finds the callee, binds it to the site and gives XLA the state to own. Execute decodes the frame
// and runs the site, on XLA's thread or, for a callee with its own, on a worker that completes a
// future.
#pragma once

#include <string_view>

#include "xla/ffi.h"

namespace callgate::xla_ffi {

inline constexpr std::string_view kGateTarget = "callgate.gate";
inline constexpr std::string_view kTapTarget = "callgate.tap";

XLA_FFI_Error* gate_instantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* gate_execute(XLA_FFI_CallFrame* frame);

}  // namespace callgate::xla_ffi
