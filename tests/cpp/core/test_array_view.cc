// SPDX-License-Identifier: Apache-2.0
// Sizes and the text form of array views.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "core/array_view.h"

namespace callgate {
namespace {

ArrayView view_of(DType dtype, const std::vector<std::int64_t>& dims) {
  return {nullptr, dims.data(), static_cast<std::int32_t>(dims.size()), dtype};
}

TEST(ArrayView, AScalarHasOneElementAndAnEmptyShape) {
  ArrayView view{nullptr, nullptr, 0, DType::kF64};
  EXPECT_EQ(view.size(), 1U);
  EXPECT_EQ(view.nbytes(), 8U);
  EXPECT_TRUE(view.shape().empty());
  EXPECT_EQ(to_string(view), "float64[]");
}

TEST(ArrayView, SizeIsTheProductOfTheExtents) {
  std::vector<std::int64_t> dims{3, 4, 5};
  ArrayView view = view_of(DType::kBF16, dims);
  EXPECT_EQ(view.size(), 60U);
  EXPECT_EQ(view.nbytes(), 120U);
  EXPECT_EQ(std::vector(view.shape().begin(), view.shape().end()), dims);
  EXPECT_EQ(to_string(view), "bfloat16[3,4,5]");
}

TEST(ArrayView, AnExtentOfZeroMakesItEmptyWhereverItStands) {
  for (const std::vector<std::int64_t>& dims :
       {std::vector<std::int64_t>{0}, {0, 7}, {7, 0}, {7, 0, 1LL << 40}}) {
    ArrayView view = view_of(DType::kC128, dims);
    EXPECT_EQ(view.size(), 0U) << to_string(view);
    EXPECT_EQ(view.nbytes(), 0U) << to_string(view);
  }
}

TEST(ArrayView, PackedTypesCountWholeBytes) {
  EXPECT_EQ(view_of(DType::kS4, {3, 3}).nbytes(), 5U);
  EXPECT_EQ(view_of(DType::kU2, {3}).nbytes(), 1U);
  EXPECT_EQ(to_string(view_of(DType::kS4, {3, 3})), "int4[3,3]");
}

TEST(ArrayView, AnUnknownTypeHasATextForm) {
  EXPECT_EQ(to_string(ArrayView{}), "invalid[]");
  EXPECT_EQ(to_string(view_of(static_cast<DType>(200), {2})), "invalid[2]");
}

}  // namespace
}  // namespace callgate
