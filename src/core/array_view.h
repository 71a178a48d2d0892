// A borrowed, dense, row-major array: what a call frame's buffer looks like to the rest of
// callgate.
//
// The view owns nothing. `dims` and `data` point into XLA's call frame, or into a copy that whoever
// made the view keeps alive; both are valid only for as long as that owner says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

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

// What a failed call leaves where it can't be an error: NaN in every floating format that has one,
// zero in integers and booleans.
void poison(const ArrayView& view) noexcept;

// All zeros.
void clear(const ArrayView& view) noexcept;

// "float32[3,4]": as JAX writes an abstract value.
std::string to_string(const ArrayView& view);

}  // namespace callgate
