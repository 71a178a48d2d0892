// SPDX-License-Identifier: Apache-2.0
// Copies into payloads: every byte, whatever the size and however many cores take part.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

#include "channel/copy.h"

namespace callgate {
namespace {

constexpr std::size_t kMebi = std::size_t{1} << 20;

TEST(Copy, TakesEveryByteAndNoOther) {
  for (std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{4095}, std::size_t{4097},
                            kMebi + 3, 16 * kMebi, 17 * kMebi + 5, 65 * kMebi + 63}) {
    std::vector<unsigned char> source(bytes + 1);
    for (std::size_t i = 0; i < bytes; ++i)
      source[i + 1] = static_cast<unsigned char>(i * 7 + i / 4099);
    for (std::size_t cores : {0, 1, 2, 3, 8, 64}) {
      constexpr std::size_t kBeyond = 64;
      auto target = std::make_unique<std::max_align_t[]>((bytes + kBeyond) / 16 + 1);
      auto* to = reinterpret_cast<char*>(target.get());
      std::memset(to, 0x5a, bytes + kBeyond);
      copy_leaf(to, source.data() + 1, bytes, cores);  // from an address that is not aligned
      EXPECT_EQ(std::memcmp(to, source.data() + 1, bytes), 0) << bytes << " bytes, " << cores;
      for (std::size_t i = bytes; i < bytes + kBeyond; ++i)
        ASSERT_EQ(to[i], 0x5a) << bytes << " bytes, " << cores << ", at " << i;
    }
  }
}

}  // namespace
}  // namespace callgate
