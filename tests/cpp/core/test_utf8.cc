// SPDX-License-Identifier: Apache-2.0
// Text of any bytes as UTF-8.
#include <gtest/gtest.h>

#include <string>

#include "core/error.h"

namespace callgate {
namespace {

TEST(Utf8, TextThatIsValidStaysAsItIs) {
  for (std::string text : {"", "plain", "naïve", "数", "🙂 and more", "\x7f", "\xed\x9f\xbf"})
    EXPECT_EQ(valid_utf8(text), text);
}

TEST(Utf8, EachByteThatIsOfNoCharacterIsWrittenOut) {
  EXPECT_EQ(valid_utf8("na\xefve"), "na\\xefve");                     // Latin-1
  EXPECT_EQ(valid_utf8("\xff\xfe text"), "\\xff\\xfe text");          // no first byte at all
  EXPECT_EQ(valid_utf8("cut \xe6\x95"), "cut \\xe6\\x95");            // the third is missing
  EXPECT_EQ(valid_utf8("\x80 \xc3"), "\\x80 \\xc3");                  // half a character each
  EXPECT_EQ(valid_utf8("\xc0\xaf"), "\\xc0\\xaf");                    // a longer form of "/"
  EXPECT_EQ(valid_utf8("\xed\xa0\x80"), "\\xed\\xa0\\x80");           // half of a pair of UTF-16
  EXPECT_EQ(valid_utf8("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");  // beyond the last one
}

}  // namespace
}  // namespace callgate
