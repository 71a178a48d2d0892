// The FFI handlers of `callgate.gate` and `callgate.tap` in programs for CUDA.
//
// As those for the CPU (xla/gate.h), but the arrays are a GPU's, and the call comes when the
// program is being given to a stream. What becomes of it is up to the callee (OnDevice):
//
// - native: the site runs at once, on XLA's thread, with the device's arrays and the stream;
// - staged: the operands are copied to pinned memory; the thread waits for them, runs the site and
//   enqueues the copies of the results. With a thread of its own the callee leaves XLA's to go on:
//   the stream itself waits for the results;
// - deferred: the operands are copied while the program goes on, and the site runs on the device's
//   completion thread when they are there. Inside a CUDA graph the copies are part of it, and the
//   site runs as a host function, once a replay.
#pragma once

#include <string_view>

#include "xla/ffi.h"

namespace callgate::xla_ffi {

// Of callables that launch the same work whenever they are called: they run when XLA captures a
// CUDA graph, and what they launched is replayed.
inline constexpr std::string_view kGraphTarget = "callgate.gate.graph";

XLA_FFI_Error* cuda_gate_instantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* cuda_gate_execute(XLA_FFI_CallFrame* frame);

// The same, which XLA may capture: for kGraphTarget and for taps.
XLA_FFI_Error* cuda_graph_execute(XLA_FFI_CallFrame* frame);

}  // namespace callgate::xla_ffi
