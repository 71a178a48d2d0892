// Text from elsewhere, such as what a C library says of an error, as text that Python and XLA take.
#pragma once

#include <string>
#include <string_view>

namespace callgate {

// `text` with each byte that is not of a character in UTF-8 written as "\xff".
std::string valid_utf8(std::string_view text);

}  // namespace callgate
