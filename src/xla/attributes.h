// The attributes of a call, as XLA hands them to the instantiate stage.
#pragma once

#include <string>
#include <string_view>

#include "core/attributes.h"
#include "xla/ffi.h"

namespace callgate::xla_ffi {

// The text of an attribute; "" where the call has none. Throws Error for one that is no string.
std::string text_attribute(const ::xla::ffi::Dictionary& attributes, std::string_view name);

// The numbers, strings, arrays and dictionaries of a dictionary attribute; none where the call has
// none. Throws Error for anything else.
Attributes decode_attributes(const XLA_FFI_Attrs& attributes, std::string_view name);

}  // namespace callgate::xla_ffi
