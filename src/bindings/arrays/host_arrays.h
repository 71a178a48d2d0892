// NumPy's arrays that Python hands to the runtime itself, outside of any program.
#pragma once

#include "bindings/bind.h"
#include "core/array_view.h"
#include "core/attributes.h"

namespace callgate::bindings {

// A contiguous array, borrowed. Throws Error for anything else; `what` is expected to be one.
ArrayView view_of(nb::handle object, const char* what);

// Strings, dictionaries of these, and arrays: of rank 0 numbers, of rank 1 arrays of numbers.
Attributes attributes_of(const nb::dict& values);

}  // namespace callgate::bindings
