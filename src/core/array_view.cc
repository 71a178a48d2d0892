// Text form of a view, for messages and reports, and what failed calls leave in one.
#include "core/array_view.h"

#include <cstring>

namespace callgate {

void poison(const ArrayView& view) noexcept {
  // All bits set is a NaN.
  if (view.nbytes() == 0) return;
  std::memset(view.data, is_inexact(view.dtype) ? 0xff : 0, view.nbytes());
}

void clear(const ArrayView& view) noexcept {
  if (view.nbytes() != 0) std::memset(view.data, 0, view.nbytes());
}

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
