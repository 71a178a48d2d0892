// What a memory check fills memory with: bytes that computations hardly ever make, and other ones
// for each array, so that what is copied from beside one array to beside another is seen.
//
// Each array of a call has a number; 0 stands for what all results start with. Under two numbers no
// byte of a pattern that tells them is the same: the common loop that goes one element too far,
// y[i] = x[i], puts the other's pattern where it doesn't belong, however far it goes. Types of one
// and two bytes can't do that for more than 252 numbers; from there on every second element does.
//
// In floating-point types of two bytes and more the rare pattern is a signalling NaN with a payload
// (of bfloat16 a quiet one from the 64th on), so that reads outside show. Types of one byte
// have too few NaNs to tell arrays by: the first numbers have them, the rest other values.
#pragma once

#include <array>
#include <cstddef>

#include "core/dtype.h"

namespace callgate {

// Bytes of an element; 1 for types of which several are in a byte.
std::size_t element_bytes(DType dtype) noexcept;

struct GuardPattern {
  // A kernel without effects runs with both: they have no byte that tells arrays in common.
  enum class Fill { kRare, kOther };

  GuardPattern(DType dtype, Fill fill, std::size_t number) noexcept;

  // The byte that belongs to a place, counted from a multiple of `period`.
  std::byte at(std::size_t place) const noexcept { return bytes[place % period]; }

  std::array<std::byte, 16> bytes{};
  std::size_t width;   // of an element
  std::size_t period;  // of the pattern
  bool rare;           // hardly any computation's value
};

}  // namespace callgate
