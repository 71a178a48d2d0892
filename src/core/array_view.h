// A borrowed, dense, row-major array: what a call frame's buffer looks like to the rest of
// callgate. `dims` and `data` point into XLA's call frame, or into a copy that whoever made the
// view keeps alive; both are valid only for as long as that owner says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"

namespace callgate {

struct ArrayView {
  void* data = nullptr;
  const std::int64_t* dims = nullptr;  // `rank` extents, outermost first
  std::int32_t rank = 0;
  DType dtype = DType::kInvalid;

  std::span<const std::int64_t> shape() const noexcept {
    return {dims, static_cast<std::size_t>(rank)};
  }

  // Number of elements; 1 for rank 0, 0 when any extent is 0.
  std::size_t size() const noexcept {
    std::size_t count = 1;
    for (std::int64_t extent : shape()) count *= static_cast<std::size_t>(extent);
    return count;
  }

  // Bytes in memory; packed types count whole bytes.
  std::size_t nbytes() const noexcept { return storage_bytes(dtype, size()); }
};

// Views with extents of their own, so that they may outlive those that they were made of.
class OwnedViews {
 public:
  explicit OwnedViews(std::span<const ArrayView> views) : views_(views.begin(), views.end()) {
    std::size_t rank = 0;
    for (const ArrayView& view : views) rank += view.shape().size();
    dims_.reserve(rank);  // views point into it
    for (ArrayView& view : views_) {
      std::int64_t* own = dims_.data() + dims_.size();
      dims_.insert(dims_.end(), view.shape().begin(), view.shape().end());
      view.dims = own;
    }
  }
  OwnedViews(OwnedViews&&) = default;
  OwnedViews& operator=(OwnedViews&&) = default;
  std::span<ArrayView> all() noexcept { return views_; }
  std::span<const ArrayView> all() const noexcept { return views_; }
  ArrayView& operator[](std::size_t i) noexcept { return views_[i]; }
  const ArrayView& operator[](std::size_t i) const noexcept { return views_[i]; }
  std::size_t size() const noexcept { return views_.size(); }

 private:
  std::vector<ArrayView> views_;
  std::vector<std::int64_t> dims_;
};

// Every byte of it. A view without elements may have no memory.
inline void fill(const ArrayView& view, int byte) noexcept {
  if (view.nbytes() != 0) std::memset(view.data, byte, view.nbytes());
}

// What a failed call leaves where it can't be an error: NaN, which is all bits set, in every
// floating format that has one, zero in integers and booleans.
inline void poison(std::span<const ArrayView> views) noexcept {
  for (const ArrayView& view : views) fill(view, is_inexact(view.dtype) ? 0xff : 0);
}

inline void clear(std::span<const ArrayView> views) noexcept {
  for (const ArrayView& view : views) fill(view, 0);
}

// From memory of the view's size, which may overlap it.
inline void copy_to(const ArrayView& view, const void* from) noexcept {
  if (view.data != from && view.nbytes() != 0) std::memmove(view.data, from, view.nbytes());
}

// "float32[3,4]": as JAX writes an abstract value.
inline std::string type_text(std::string_view dtype, std::span<const std::int64_t> shape) {
  std::string text = std::string(dtype) + '[';
  for (std::size_t axis = 0; axis < shape.size(); ++axis)
    text.append(axis == 0 ? "" : ",").append(std::to_string(shape[axis]));
  return text + ']';
}
inline std::string to_string(const ArrayView& view) {
  return type_text(name(view.dtype), view.shape());
}
// "(float32[3], int32[])"
inline std::string to_string(std::span<const ArrayView> views) {
  std::string text = "(";
  for (const ArrayView& view : views)
    text.append(text.size() > 1 ? ", " : "").append(to_string(view));
  return text + ')';
}

}  // namespace callgate
