// JSON text of values: what the JSON Lines sink writes and any JSON reader reads.
//
// Floats have the fewest digits that give back the same value (of float32 for smaller types), and
// always a point or an exponent, so that they stay floats. JSON has no infinities: they and NaN are
// the strings "NaN", "Infinity" and "-Infinity", which Python's float() takes. A complex number is
// [real, imaginary]. https://www.rfc-editor.org/rfc/rfc8259
#pragma once

#include <string>
#include <string_view>

#include "core/array_view.h"

namespace callgate {

// `text`, UTF-8, as a JSON string with its quotes.
void append_json_string(std::string& out, std::string_view text);

// A number for rank 0, else lists nested to the array's rank.
void append_json_array(std::string& out, const ArrayView& view);

}  // namespace callgate
