// Text form of a view, for messages and reports, and what is written into one as a whole.
#include "core/array_view.h"

#include <cstring>

namespace callgate {
namespace {

// A view without elements may have no memory.
void fill(const ArrayView& view, int byte) noexcept {
  if (view.nbytes() != 0) std::memset(view.data, byte, view.nbytes());
}

}  // namespace

OwnedViews::OwnedViews(std::span<const ArrayView> views) : views_(views.begin(), views.end()) {
  std::size_t rank = 0;
  for (const ArrayView& view : views) rank += view.shape().size();
  dims_.reserve(rank);  // views point into it
  for (ArrayView& view : views_) {
    std::int64_t* own = dims_.data() + dims_.size();
    dims_.insert(dims_.end(), view.shape().begin(), view.shape().end());
    view.dims = own;
  }
}

void poison(std::span<const ArrayView> views) noexcept {
  // All bits set is a NaN.
  for (const ArrayView& view : views) fill(view, is_inexact(view.dtype) ? 0xff : 0);
}

void clear(std::span<const ArrayView> views) noexcept {
  for (const ArrayView& view : views) fill(view, 0);
}

void copy_to(const ArrayView& view, const void* from) noexcept {
  if (view.data != from && view.nbytes() != 0) std::memmove(view.data, from, view.nbytes());
}

std::string type_text(std::string_view dtype, std::span<const std::int64_t> shape) {
  std::string text(dtype);
  text += '[';
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    if (axis != 0) text += ',';
    text += std::to_string(shape[axis]);
  }
  return text + ']';
}

std::string to_string(const ArrayView& view) { return type_text(name(view.dtype), view.shape()); }

std::string to_string(std::span<const ArrayView> views) {
  std::string text = "(";
  for (const ArrayView& view : views)
    text.append(text.size() > 1 ? ", " : "").append(to_string(view));
  return text + ')';
}

}  // namespace callgate
