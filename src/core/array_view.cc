// SPDX-License-Identifier: Apache-2.0
// Arrays as texts.
#include "core/array_view.h"

namespace callgate {

std::string type_text(std::string_view dtype, std::span<const std::int64_t> shape) {
  std::string text = std::string(dtype) + '[';
  for (std::size_t axis = 0; axis < shape.size(); ++axis)
    text.append(axis == 0 ? "" : ",").append(std::to_string(shape[axis]));
  return text + ']';
}

std::string to_string(std::span<const ArrayView> views) {
  std::string text = "(";
  for (const ArrayView& view : views)
    text.append(text.size() > 1 ? ", " : "").append(to_string(view));
  return text + ')';
}

}  // namespace callgate
