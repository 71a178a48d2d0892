// SPDX-License-Identifier: Apache-2.0
// The arrays of a call: their element types, and views of them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace callgate {

// The element types, one row per XLA FFI type code. The codes are those of XLA_FFI_DataType, a
// stable ABI. They are repeated here so that the core needs no XLA header; xla/ffi.h checks that
// both agree. A *packed* type stores more than one element in a byte on XLA's side; callgate
// unpacks it before it passes on a view.
//
// X(identifier, code, NumPy or ml_dtypes name, bits per element)
#define CALLGATE_DTYPES(X)                      \
  X(Pred, 1, "bool", 8)                         \
  X(S8, 2, "int8", 8)                           \
  X(S16, 3, "int16", 16)                        \
  X(S32, 4, "int32", 32)                        \
  X(S64, 5, "int64", 64)                        \
  X(U8, 6, "uint8", 8)                          \
  X(U16, 7, "uint16", 16)                       \
  X(U32, 8, "uint32", 32)                       \
  X(U64, 9, "uint64", 64)                       \
  X(F16, 10, "float16", 16)                     \
  X(F32, 11, "float32", 32)                     \
  X(F64, 12, "float64", 64)                     \
  X(C64, 15, "complex64", 64)                   \
  X(BF16, 16, "bfloat16", 16)                   \
  X(C128, 18, "complex128", 128)                \
  X(F8E5M2, 19, "float8_e5m2", 8)               \
  X(F8E4M3FN, 20, "float8_e4m3fn", 8)           \
  X(S4, 21, "int4", 4)                          \
  X(U4, 22, "uint4", 4)                         \
  X(F8E4M3B11FNUZ, 23, "float8_e4m3b11fnuz", 8) \
  X(F8E5M2FNUZ, 24, "float8_e5m2fnuz", 8)       \
  X(F8E4M3FNUZ, 25, "float8_e4m3fnuz", 8)       \
  X(S2, 26, "int2", 2)                          \
  X(U2, 27, "uint2", 2)                         \
  X(F8E4M3, 28, "float8_e4m3", 8)               \
  X(F8E3M4, 29, "float8_e3m4", 8)               \
  X(S1, 30, "int1", 1)                          \
  X(U1, 31, "uint1", 1)                         \
  X(F4E2M1FN, 32, "float4_e2m1fn", 4)           \
  X(F8E8M0FNU, 33, "float8_e8m0fnu", 8)

enum class DType : std::uint8_t {
  kInvalid = 0,
#define X(identifier, code, name, bits) k##identifier = code,
  CALLGATE_DTYPES(X)
#undef X
};

// One past the greatest code: the length of a table indexed by code.
inline constexpr std::size_t kDTypeTableSize = 40;

namespace detail {
struct DTypeRow {
  std::string_view name = "invalid";
  int bits = 0;
};

inline constexpr auto kDTypeRows = [] {
  std::array<DTypeRow, kDTypeTableSize> rows{};
#define X(identifier, code, name, bits) rows[code] = {name, bits};
  CALLGATE_DTYPES(X)
#undef X
  return rows;
}();

// A later XLA may have codes beyond the table; row 0 is the invalid type.
constexpr const DTypeRow& row(DType dtype) noexcept {
  auto code = static_cast<std::size_t>(dtype);
  return kDTypeRows[code < kDTypeTableSize ? code : 0];
}
}  // namespace detail

// Bits of one element, and the NumPy or ml_dtypes name; 0 and "invalid" for an unknown code.
constexpr int bits(DType dtype) noexcept { return detail::row(dtype).bits; }
constexpr std::string_view name(DType dtype) noexcept { return detail::row(dtype).name; }

// True if XLA packs several elements into a byte.
constexpr bool is_packed(DType dtype) noexcept { return bits(dtype) < 8; }
// True for floating-point and complex types.
constexpr bool is_inexact(DType dtype) noexcept {
  std::string_view text = name(dtype);
  return text.starts_with("float") || text.starts_with("bfloat") || text.starts_with("complex");
}

// The bytes of `count` elements in XLA's memory; packed types round up to a whole byte.
constexpr std::size_t storage_bytes(DType dtype, std::size_t count) noexcept {
  return (count * static_cast<std::size_t>(bits(dtype)) + 7) / 8;
}

// The type of a code or a name, if the table has it.
constexpr std::optional<DType> dtype_from_code(int code) noexcept {
  if (code < 0 || code >= int{kDTypeTableSize}) return std::nullopt;
  auto dtype = static_cast<DType>(code);
  return bits(dtype) != 0 ? std::optional(dtype) : std::nullopt;
}

constexpr std::optional<DType> dtype_from_name(std::string_view text) noexcept {
  for (int code = 0; code < int{kDTypeTableSize}; ++code) {
    auto dtype = dtype_from_code(code);
    if (dtype && name(*dtype) == text) return dtype;
  }
  return std::nullopt;
}

// DLPack's code of a type (DLDataTypeCode). Packed types have none, since DLPack doesn't define
// their layout.
constexpr std::optional<std::uint8_t> dlpack_code(DType dtype) noexcept {
  constexpr std::pair<DType, std::uint8_t> kCodes[] = {
      {DType::kS8, 0},          {DType::kS16, 0},         {DType::kS32, 0},
      {DType::kS64, 0},         {DType::kU8, 1},          {DType::kU16, 1},
      {DType::kU32, 1},         {DType::kU64, 1},         {DType::kF16, 2},
      {DType::kF32, 2},         {DType::kF64, 2},         {DType::kBF16, 4},
      {DType::kC64, 5},         {DType::kC128, 5},        {DType::kPred, 6},
      {DType::kF8E3M4, 7},      {DType::kF8E4M3, 8},      {DType::kF8E4M3B11FNUZ, 9},
      {DType::kF8E4M3FN, 10},   {DType::kF8E4M3FNUZ, 11}, {DType::kF8E5M2, 12},
      {DType::kF8E5M2FNUZ, 13}, {DType::kF8E8M0FNU, 14}};
  for (auto [known, code] : kCodes)
    if (known == dtype) return code;
  return std::nullopt;
}

// A borrowed, dense, row-major array: the form of a call frame's buffer in all of callgate. `dims`
// and `data` point into XLA's call frame, or into a copy that the view's creator keeps alive; they
// are valid as long as their owner.
struct ArrayView {
  void* data = nullptr;
  const std::int64_t* dims = nullptr;  // `rank` extents, outermost first
  std::int32_t rank = 0;
  DType dtype = DType::kInvalid;

  std::span<const std::int64_t> shape() const noexcept {
    return {dims, static_cast<std::size_t>(rank)};
  }

  // The number of elements; 1 for rank 0, 0 if any extent is 0.
  std::size_t size() const noexcept {
    std::size_t count = 1;
    for (std::int64_t extent : shape()) count *= static_cast<std::size_t>(extent);
    return count;
  }

  // The bytes in memory; packed types count whole bytes.
  std::size_t nbytes() const noexcept { return storage_bytes(dtype, size()); }
};

// Views with extents of their own, so they may outlive the views from which they were made.
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
  const ArrayView& operator[](std::size_t i) const noexcept { return views_[i]; }
  std::size_t size() const noexcept { return views_.size(); }

 private:
  std::vector<ArrayView> views_;
  std::vector<std::int64_t> dims_;
};

// Sets every byte. A view without elements may have no memory.
inline void fill(const ArrayView& view, int byte) noexcept {
  if (view.nbytes() != 0) std::memset(view.data, byte, view.nbytes());
}

// Fills the results of a failed call that can't return an error. All bits are set in floating
// formats with a NaN, which gives NaN; integers and booleans become zero.
inline void poison(std::span<const ArrayView> views) noexcept {
  for (const ArrayView& view : views) fill(view, is_inexact(view.dtype) ? 0xff : 0);
}

inline void clear(std::span<const ArrayView> views) noexcept {
  for (const ArrayView& view : views) fill(view, 0);
}

// Copies from memory of the view's size, which may overlap it.
inline void copy_to(const ArrayView& view, const void* from) noexcept {
  if (view.data != from && view.nbytes() != 0) std::memmove(view.data, from, view.nbytes());
}

// "float32[3,4]", as JAX prints an abstract value.
std::string type_text(std::string_view dtype, std::span<const std::int64_t> shape);
inline std::string to_string(const ArrayView& view) {
  return type_text(name(view.dtype), view.shape());
}
// "(float32[3], int32[])"
std::string to_string(std::span<const ArrayView> views);

}  // namespace callgate
