// SPDX-License-Identifier: Apache-2.0
// The header of a .npy file, written and read, and NumPy's names of XLA's element types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/array_view.h"
#include "core/error.h"

namespace callgate {

// True if a column stores the elements as they are in memory.
bool npy_stores_as_is(DType dtype) noexcept;

// NumPy's name of a column's element type: "<f4". A type that NumPy lacks is stored as the smallest
// type with all its values: float32 for bfloat16 and smaller floats, int8 and uint8 for packed
// integers.
std::string npy_descr(DType dtype);

// The header, version 1.0, of a file whose first axis grows: a magic number, the length of the text
// in two bytes, and the text of a Python dict.
// https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
struct NpyHeader {
  // The maximum number of bytes that parse() needs.
  static constexpr std::size_t kLimit = 10 + 65535;

  std::string descr;
  std::vector<std::int64_t> row;  // a row's extents: the array's without the first
  std::uint64_t rows = 0;
  std::size_t bytes = 0;  // of the header, from the start of the file to the first element

  // The text, padded to `bytes`; if that is 0, to a multiple of 64 with room for any number of
  // rows. Throws Error if `bytes` is too small.
  std::string text() const;

  // Reads the start of a file; throws Error with `path` unless it is a growing C-ordered array.
  static NpyHeader parse(std::string_view file, const std::string& path);

 private:
  static constexpr std::string_view kMagic{"\x93NUMPY\x01\x00", 8};
  static constexpr std::size_t kPrefix = 10;  // the magic number and the length

  // The text behind `key`, a colon and a space in the dict's text; "" if the key is missing.
  static std::string_view value_of(std::string_view text, std::string_view key);
};

}  // namespace callgate
