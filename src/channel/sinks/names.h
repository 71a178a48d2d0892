// What a leaf of a record is called in files: "loss" for a lone leaf of the tap "loss", else
// "loss/w/0"; of a tangent or cotangent "loss:tangent", "loss:cotangent/w/0". The Python sinks
// (`callgate.sinks.columns`) name leaves the same way.
#pragma once

#include <string>
#include <string_view>

#include "channel/record.h"

namespace callgate {

// "primal", "tangent" or "cotangent".
std::string_view role_name(Role role) noexcept;

// A leaf's path without the marks of its container's type: "w/0/x" of "['w'][0].x".
std::string plain_path(std::string_view path);

// Throws Error where two leaves of a tap would have one name: {"a/b": x, "a": {"b": y}}.
void check_names(std::string_view sink, const Source& source);

std::string column_name(const Source& source, const LeafType& leaf);

}  // namespace callgate
