// How other libraries get at a Buffer's memory: DLPack, on the host and on GPUs, and CUDA's array
// interface. The GIL is held.
//
// On a GPU what the Buffer shows is written by work on XLA's stream that may not have run yet. A
// consumer says in which stream it will use the memory, and that stream waits; nobody else does.
#pragma once

#include "bindings/arrays/buffer.h"

namespace callgate::bindings {

// Adds the protocols to the Python type.
void bind_buffer_exchange(nb::class_<Buffer>& type);

}  // namespace callgate::bindings
