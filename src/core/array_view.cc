// Text form of a view, for messages and reports.
#include "core/array_view.h"

namespace callgate {

std::string to_string(const ArrayView& view) {
  std::string text(name(view.dtype));
  text += '[';
  for (std::int32_t axis = 0; axis < view.rank; ++axis) {
    if (axis != 0) text += ',';
    text += std::to_string(view.dims[axis]);
  }
  text += ']';
  return text;
}

}  // namespace callgate
