// The element types of arrays that cross a call: one row per XLA FFI type code.
//
// The codes are those of XLA_FFI_DataType (a stable ABI), restated here so that the core needs no
// XLA header; src/xla/decode.cc checks at compile time that the two agree. A *packed* type holds
// more than one element in a byte on XLA's side: its byte count follows from `bits`, never from an
// element size, and no view of it is handed out without unpacking.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace callgate {

// X(identifier, code, NumPy or ml_dtypes name, bits per element)
#define CALLGATE_DTYPES(X)                       \
  X(kPred, 1, "bool", 8)                         \
  X(kS8, 2, "int8", 8)                           \
  X(kS16, 3, "int16", 16)                        \
  X(kS32, 4, "int32", 32)                        \
  X(kS64, 5, "int64", 64)                        \
  X(kU8, 6, "uint8", 8)                          \
  X(kU16, 7, "uint16", 16)                       \
  X(kU32, 8, "uint32", 32)                       \
  X(kU64, 9, "uint64", 64)                       \
  X(kF16, 10, "float16", 16)                     \
  X(kF32, 11, "float32", 32)                     \
  X(kF64, 12, "float64", 64)                     \
  X(kC64, 15, "complex64", 64)                   \
  X(kBF16, 16, "bfloat16", 16)                   \
  X(kC128, 18, "complex128", 128)                \
  X(kF8E5M2, 19, "float8_e5m2", 8)               \
  X(kF8E4M3FN, 20, "float8_e4m3fn", 8)           \
  X(kS4, 21, "int4", 4)                          \
  X(kU4, 22, "uint4", 4)                         \
  X(kF8E4M3B11FNUZ, 23, "float8_e4m3b11fnuz", 8) \
  X(kF8E5M2FNUZ, 24, "float8_e5m2fnuz", 8)       \
  X(kF8E4M3FNUZ, 25, "float8_e4m3fnuz", 8)       \
  X(kS2, 26, "int2", 2)                          \
  X(kU2, 27, "uint2", 2)                         \
  X(kF8E4M3, 28, "float8_e4m3", 8)               \
  X(kF8E3M4, 29, "float8_e3m4", 8)               \
  X(kS1, 30, "int1", 1)                          \
  X(kU1, 31, "uint1", 1)                         \
  X(kF4E2M1FN, 32, "float4_e2m1fn", 4)           \
  X(kF8E8M0FNU, 33, "float8_e8m0fnu", 8)

enum class DType : std::uint8_t {
  kInvalid = 0,
#define X(identifier, code, name, bits) identifier = code,
  CALLGATE_DTYPES(X)
#undef X
};

// One past the greatest code: the length of a table indexed by code.
inline constexpr std::size_t kDTypeTableSize = 40;

// Bits of one element; 0 for a code that is not in the table.
int bits(DType dtype) noexcept;

// The NumPy or ml_dtypes name; "invalid" for a code that is not in the table.
std::string_view name(DType dtype) noexcept;

// True when XLA packs several elements into a byte.
inline bool is_packed(DType dtype) noexcept { return bits(dtype) < 8; }

// True for floating-point and complex types.
bool is_inexact(DType dtype) noexcept;

// Bytes that `count` elements take in XLA's memory; packed types round up to a whole byte.
std::size_t storage_bytes(DType dtype, std::size_t count) noexcept;

// The type of a code, if the table has it.
std::optional<DType> dtype_from_code(int code) noexcept;

// The type of a name, if the table has it.
std::optional<DType> dtype_from_name(std::string_view name) noexcept;

}  // namespace callgate
