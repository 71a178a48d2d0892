// What each file of this layer adds to the module; channel/channel.h names its own.
#pragma once

#include "bindings/python/python.h"

namespace callgate::bindings {

void bind_buffer(nb::module_& module);       // `Buffer`
void bind_upload(nb::module_& module);       // `Upload`: an item of a feed on its way to a GPU
void bind_gate(nb::module_& module);         // `Callee`, `Check`, `Context`
void bind_kernel(nb::module_& module);       // `Kernel`, `KernelTurn`, what reads a library's table
void bind_cuda_kernel(nb::module_& module);  // `CudaKernel`, `Nvrtc`, what devices there are
void bind_progress(nb::module_& module);     // the board of bars, for the thread that draws them
void bind_interrupt(nb::module_& module);    // Ctrl-C in Python's terms, for core/interrupt.h
// The very end of the process, after Python's: what came too late is reported, and failures that
// were found at the end make the exit status say so.
void bind_exit(nb::module_& module);

}  // namespace callgate::bindings
