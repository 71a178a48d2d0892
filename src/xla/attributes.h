// The attributes of a call, as XLA hands them to the instantiate stage.
#pragma once

#include "core/attributes.h"
#include "xla/ffi.h"

namespace callgate::xla_ffi {

// All of them: numbers, strings, arrays of numbers and dictionaries. Throws Error for anything
// else.
Attributes decode_attributes(const XLA_FFI_Attrs& attributes);

}  // namespace callgate::xla_ffi
