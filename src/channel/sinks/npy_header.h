// The header of a .npy file whose first axis grows.
// https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"

namespace callgate {

// NumPy's name of the element type of a column: "<f4". A dtype that NumPy lacks is stored as the
// smallest of NumPy's that holds all its values: float32 for bfloat16 and smaller floats, int8 and
// uint8 for packed integers.
std::string npy_descr(DType dtype);

// True where a column holds the elements as they are in memory.
bool npy_stores_as_is(DType dtype) noexcept;

struct NpyHeader {
  std::string descr;
  std::vector<std::int64_t> row;  // extents of a row: the array's without the first
  std::uint64_t rows = 0;
  std::size_t bytes = 0;  // of the header, from the start of the file to the first element

  // The text, padded to `bytes`, or, where that is 0, to a multiple of 64 with room for any number
  // of rows. Throws Error where `bytes` is too few.
  std::string text() const;

  // Reads the start of a file; throws Error naming `path` unless a growing C-ordered array is
  // there.
  static NpyHeader parse(std::string_view file, const std::string& path);
};

// The most bytes of a file that NpyHeader::parse needs.
inline constexpr std::size_t kNpyHeaderLimit = 10 + 65535;

}  // namespace callgate
