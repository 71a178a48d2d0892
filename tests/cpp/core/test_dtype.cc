// SPDX-License-Identifier: Apache-2.0
// The table of element types against XLA's own enum and an independent list of names and widths.
#include <gtest/gtest.h>

#include <cstddef>
#include <set>
#include <string_view>

#include "core/array_view.h"
#include "xla/ffi/api/c_api.h"

namespace callgate {
namespace {

struct Expected {
  XLA_FFI_DataType code;
  DType dtype;
  std::string_view name;
  int bits;
};

constexpr Expected kExpected[] = {
    {XLA_FFI_DataType_PRED, DType::kPred, "bool", 8},
    {XLA_FFI_DataType_S1, DType::kS1, "int1", 1},
    {XLA_FFI_DataType_S2, DType::kS2, "int2", 2},
    {XLA_FFI_DataType_S4, DType::kS4, "int4", 4},
    {XLA_FFI_DataType_S8, DType::kS8, "int8", 8},
    {XLA_FFI_DataType_S16, DType::kS16, "int16", 16},
    {XLA_FFI_DataType_S32, DType::kS32, "int32", 32},
    {XLA_FFI_DataType_S64, DType::kS64, "int64", 64},
    {XLA_FFI_DataType_U1, DType::kU1, "uint1", 1},
    {XLA_FFI_DataType_U2, DType::kU2, "uint2", 2},
    {XLA_FFI_DataType_U4, DType::kU4, "uint4", 4},
    {XLA_FFI_DataType_U8, DType::kU8, "uint8", 8},
    {XLA_FFI_DataType_U16, DType::kU16, "uint16", 16},
    {XLA_FFI_DataType_U32, DType::kU32, "uint32", 32},
    {XLA_FFI_DataType_U64, DType::kU64, "uint64", 64},
    {XLA_FFI_DataType_F16, DType::kF16, "float16", 16},
    {XLA_FFI_DataType_F32, DType::kF32, "float32", 32},
    {XLA_FFI_DataType_F64, DType::kF64, "float64", 64},
    {XLA_FFI_DataType_BF16, DType::kBF16, "bfloat16", 16},
    {XLA_FFI_DataType_C64, DType::kC64, "complex64", 64},
    {XLA_FFI_DataType_C128, DType::kC128, "complex128", 128},
    {XLA_FFI_DataType_F8E5M2, DType::kF8E5M2, "float8_e5m2", 8},
    {XLA_FFI_DataType_F8E3M4, DType::kF8E3M4, "float8_e3m4", 8},
    {XLA_FFI_DataType_F8E4M3, DType::kF8E4M3, "float8_e4m3", 8},
    {XLA_FFI_DataType_F8E4M3FN, DType::kF8E4M3FN, "float8_e4m3fn", 8},
    {XLA_FFI_DataType_F8E4M3B11FNUZ, DType::kF8E4M3B11FNUZ, "float8_e4m3b11fnuz", 8},
    {XLA_FFI_DataType_F8E5M2FNUZ, DType::kF8E5M2FNUZ, "float8_e5m2fnuz", 8},
    {XLA_FFI_DataType_F8E4M3FNUZ, DType::kF8E4M3FNUZ, "float8_e4m3fnuz", 8},
    {XLA_FFI_DataType_F4E2M1FN, DType::kF4E2M1FN, "float4_e2m1fn", 4},
    {XLA_FFI_DataType_F8E8M0FNU, DType::kF8E8M0FNU, "float8_e8m0fnu", 8},
};

TEST(DType, EveryRowHasXlasCodeNameAndWidth) {
  for (const Expected& row : kExpected) {
    SCOPED_TRACE(row.name);
    EXPECT_EQ(static_cast<int>(row.dtype), static_cast<int>(row.code));
    EXPECT_EQ(name(row.dtype), row.name);
    EXPECT_EQ(bits(row.dtype), row.bits);
  }
}

TEST(DType, CodesAndNamesRoundTrip) {
  for (const Expected& row : kExpected) {
    EXPECT_EQ(dtype_from_code(row.code), row.dtype) << row.name;
    EXPECT_EQ(dtype_from_name(row.name), row.dtype) << row.name;
  }
}

TEST(DType, TheTableHoldsNothingElse) {
  std::set<int> codes;
  for (const Expected& row : kExpected) codes.insert(row.code);
  for (int code = -300; code < 300; ++code) {
    EXPECT_EQ(dtype_from_code(code).has_value(), codes.contains(code)) << code;
  }
  EXPECT_FALSE(dtype_from_code(XLA_FFI_DataType_TOKEN));
  EXPECT_FALSE(dtype_from_name("invalid"));
  EXPECT_FALSE(dtype_from_name(""));
  EXPECT_FALSE(dtype_from_name("float"));
}

TEST(DType, CodesOfALaterXlaHaveNoWidthAndNoName) {
  for (int code = 0; code < 256; ++code) {
    if (dtype_from_code(code)) continue;
    EXPECT_EQ(bits(static_cast<DType>(code)), 0) << code;
    EXPECT_EQ(name(static_cast<DType>(code)), "invalid") << code;
  }
}

TEST(DType, ATypeIsPackedWhenAByteHoldsSeveral) {
  for (const Expected& row : kExpected) {
    EXPECT_EQ(is_packed(row.dtype), row.bits == 1 || row.bits == 2 || row.bits == 4) << row.name;
  }
}

TEST(DType, StorageIsTheFewestBytesThatHoldTheElements) {
  for (const Expected& row : kExpected) {
    for (std::size_t count = 0; count < 40; ++count) {
      std::size_t bytes = 0;
      while (bytes * 8 < count * static_cast<std::size_t>(row.bits)) ++bytes;
      EXPECT_EQ(storage_bytes(row.dtype, count), bytes) << row.name << " x " << count;
    }
  }
}

}  // namespace
}  // namespace callgate
