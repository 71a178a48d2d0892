// Python references that die on threads without the GIL.
//
// XLA destroys executables, and with them the last reference to a callable, on whatever thread
// comes by. Taking the GIL there could deadlock with a thread that holds it and waits for this one.
// So the reference is queued and dropped later by a thread that has the GIL: the main thread,
// through a pending call, or any binding that drains on its way.
#pragma once

#include "bindings/python/python.h"

namespace callgate::bindings {

// Takes the reference over; drops it soon under the GIL. Any thread, GIL held or not.
void release_later(PyObject* object) noexcept;

// Drops what is queued. The GIL is held.
void drain_released() noexcept;

// After this, queued references are leaked: the interpreter is going away.
void stop_releasing() noexcept;

}  // namespace callgate::bindings
