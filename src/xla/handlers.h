// SPDX-License-Identifier: Apache-2.0
// The FFI handlers, by target. Each target has two. Instantiate runs once per call site and
// executable, also when one is loaded from a cache: it finds the callee by its name, binds it to
// the site and gives XLA the state to own. Execute decodes the frame and runs the site.
#pragma once

#include <string_view>

#include "xla/ffi.h"

namespace callgate::xla_ffi {

// A call of any callee: on XLA's thread or, for a callee with its own thread, on a worker that
// completes a future. Taps of small arrays have a separate target, because on CUDA XLA may capture
// these into graphs.
inline constexpr std::string_view kGateTarget = "callgate.gate";
inline constexpr std::string_view kTapTarget = "callgate.tap";
extern XLA_FFI_Handler &gate_instantiate, &gate_execute;

// The same in programs for CUDA: the arrays are a GPU's, and the call happens when the program is
// enqueued on a stream. The callee chooses the mode (OnDevice):
//
// - native: the site runs at once, on XLA's thread, with the device's arrays and the stream;
// - staged: the operands are copied to pinned memory; the thread waits for them, runs the site and
//   enqueues the copies of the results. With a callee on its own thread, XLA's thread continues,
//   and the stream itself waits for the results;
// - deferred: the operands are copied while the program continues, and the site then runs on the
//   device's completion thread. Inside a CUDA graph the copies belong to the graph, and the site
//   runs as a host function, once per replay.
extern XLA_FFI_Handler &cuda_gate_instantiate, &cuda_gate_execute;
// The same, which XLA may capture into a CUDA graph: for taps, and for callables that launch the
// same work at each call. These run at the capture, and their launches are replayed.
inline constexpr std::string_view kGraphTarget = "callgate.gate.graph";
extern XLA_FFI_Handler& cuda_graph_execute;

// A call of native code, with little overhead: no thread, no Python, nothing to drain at exit.
inline constexpr std::string_view kKernelTarget = "callgate.kernel";
extern XLA_FFI_Handler &kernel_instantiate, &kernel_execute;

// In programs for CUDA: launches on XLA's stream. They may be captured into CUDA graphs, whose
// replays then launch without the host. `callgate.kernel.scratch` may not: it is for calls with
// scratch memory, which a graph's replays would no longer own, and for calls on shards that only
// some devices make.
inline constexpr std::string_view kKernelScratchTarget = "callgate.kernel.scratch";
extern XLA_FFI_Handler &cuda_kernel_instantiate, &cuda_kernel_execute, &cuda_kernel_scratch_execute;

}  // namespace callgate::xla_ffi
