// SPDX-License-Identifier: Apache-2.0
// The messages of errors.
#include <gtest/gtest.h>

#include <string>

#include "core/error.h"

namespace callgate {
namespace {

TEST(Error, SaysWhereWhatWasExpectedAndWhatCame) {
  Error error(ErrorCode::kInvalidArgument, "argument 'x' of gate 'f'", "float32[3]", "int32[3]");
  EXPECT_STREQ(error.what(),
               "callgate: argument 'x' of gate 'f': expected float32[3], got int32[3]");
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
}

TEST(Error, CarriesAPlainMessage) {
  Error error(ErrorCode::kNotFound, "nothing here");
  EXPECT_STREQ(error.what(), "callgate: nothing here");
  EXPECT_EQ(error.code(), ErrorCode::kNotFound);
}

TEST(Error, IsAStandardException) {
  EXPECT_THROW(throw Error(ErrorCode::kInternal, "x"), std::runtime_error);
}

TEST(Error, MayHaveATextOfItsOwn) {
  Error error = Error::verbatim(ErrorCode::kAborted, std::string(200, 'm'));
  EXPECT_EQ(error.code(), ErrorCode::kAborted);
  EXPECT_EQ(error.what(), std::string(200, 'm'));
}

}  // namespace
}  // namespace callgate
