// SPDX-License-Identifier: Apache-2.0
// Padded leaves of a record: what counts of them, by the sizes that came along.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "channel/consumer.h"
#include "channel/record.h"
#include "core/error.h"

namespace callgate {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A record of one leaf and its sizes.
class Padding : public ::testing::Test {
 protected:
  void describe(DType dtype, std::vector<std::int64_t> dims, std::vector<std::int64_t> sizes_dims) {
    add("['w']", dtype, std::move(dims));
    add("logical_shape['w']", DType::kS32, std::move(sizes_dims));
    source_.name = "x";
    source_.value_leaves = 2;
    source_.padded = {{}};
    payload_.assign(source_.payload_bytes, 0);
  }

  template <typename T>
  void fill(std::size_t leaf, const std::vector<T>& values) {
    ASSERT_LE(values.size() * sizeof(T), source_.leaves[leaf].nbytes);
    std::memcpy(payload_.data() + source_.leaves[leaf].offset, values.data(),
                values.size() * sizeof(T));
  }

  // The elements' bytes of each lane, and its shape.
  struct Lane {
    std::vector<std::int64_t> dims;
    std::vector<std::uint8_t> bytes;
  };
  std::vector<Lane> lanes(std::uint32_t flags = 0) {
    Record record{&source_, 0, 0, 0, 0, flags, payload_.data()};
    std::vector<Lane> found;
    RecordViews(source_).each_lane(record, [&](std::int64_t, std::span<const ArrayView> leaves) {
      EXPECT_EQ(leaves.size(), 1U);
      const auto* data = static_cast<const std::uint8_t*>(leaves[0].data);
      found.push_back({{leaves[0].shape().begin(), leaves[0].shape().end()},
                       {data, data + leaves[0].nbytes()}});
    });
    return found;
  }

  Source source_;

 private:
  void add(std::string path, DType dtype, std::vector<std::int64_t> dims) {
    LeafType leaf{std::move(path), dtype, std::move(dims), source_.payload_bytes, 0};
    leaf.nbytes =
        ArrayView{nullptr, leaf.dims.data(), static_cast<std::int32_t>(leaf.dims.size()), dtype}
            .nbytes();
    source_.payload_bytes += align_record(leaf.nbytes);
    source_.leaves.push_back(std::move(leaf));
  }

  std::vector<char> payload_;
};

TEST_F(Padding, TheCornerThatCountsIsKept) {
  describe(DType::kU8, {2, 3, 2}, {3});
  fill<std::uint8_t>(0, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
  fill<std::int32_t>(1, {2, 2, 1});
  EXPECT_THAT(lanes()[0].dims, ElementsAre(2, 2, 1));
  EXPECT_THAT(lanes()[0].bytes, ElementsAre(0, 2, 6, 8));
  fill<std::int32_t>(1, {2, 3, 2});
  EXPECT_EQ(lanes()[0].bytes.size(), 12U);
  for (std::vector<std::int32_t> empty :
       {std::vector{0, 3, 2}, std::vector{2, 0, 2}, std::vector{2, 3, 0}}) {
    fill<std::int32_t>(1, empty);
    EXPECT_THAT(lanes()[0].dims, ElementsAre(empty[0], empty[1], empty[2]));
    EXPECT_THAT(lanes()[0].bytes, IsEmpty());
  }
}

TEST_F(Padding, PackedElementsStayPacked) {
  describe(DType::kU4, {2, 3}, {2});
  fill<std::uint8_t>(0, {0x21, 0x43, 0x65});  // 1 2 3, 4 5 6
  fill<std::int32_t>(1, {2, 2});
  EXPECT_THAT(lanes()[0].bytes, ElementsAre(0x21, 0x54));
  fill<std::int32_t>(1, {2, 1});
  EXPECT_THAT(lanes()[0].bytes, ElementsAre(0x41));
}

TEST_F(Padding, LanesHaveSizesOfTheirOwn) {
  describe(DType::kU8, {2, 3}, {2, 1});
  const std::vector<std::int64_t> masks{1, 1};
  source_.lanes = Lanes({2}, masks);
  fill<std::uint8_t>(0, {1, 2, 3, 4, 5, 6});
  fill<std::int32_t>(1, {1, 2});
  const std::vector<Lane> found = lanes();
  ASSERT_EQ(found.size(), 2U);
  EXPECT_THAT(found[0].bytes, ElementsAre(1));
  EXPECT_THAT(found[1].bytes, ElementsAre(4, 5));
}

TEST_F(Padding, LanesThatStayTogetherLoseThePaddingOfTheLastAxes) {
  describe(DType::kU8, {2, 3}, {1});
  fill<std::uint8_t>(0, {1, 2, 3, 4, 5, 6});
  fill<std::int32_t>(1, {2});
  EXPECT_THAT(lanes()[0].bytes, ElementsAre(1, 2, 4, 5));
}

TEST_F(Padding, SizesOfTheWholeAreThoseOfItsShards) {
  describe(DType::kU8, {2}, {1});
  source_.padded[0].whole = {6};
  source_.padded[0].starts = {{0}, {2}, {4}};
  fill<std::uint8_t>(0, {7, 8});
  fill<std::int32_t>(1, {3});
  auto of_shard = [&](std::uint32_t shard) { return lanes((shard + 1) << kShardBit)[0].bytes; };
  EXPECT_THAT(of_shard(0), ElementsAre(7, 8));
  EXPECT_THAT(of_shard(1), ElementsAre(7));
  EXPECT_THAT(of_shard(2), IsEmpty());
}

TEST_F(Padding, SizesThatTheArrayHasNotAreAnError) {
  describe(DType::kU8, {2, 3}, {2});
  for (const auto& [sizes, said] : {std::pair{std::vector{3, 0}, "from 0 to 2, got 3"},
                                    std::pair{std::vector{2, -1}, "from 0 to 3, got -1"}}) {
    fill<std::int32_t>(1, sizes);
    try {
      lanes();
      ADD_FAILURE() << "expected an error";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("tap 'x': logical_shape['w'], dimension"));
      EXPECT_THAT(error.what(), HasSubstr(said));
    }
  }
}

}  // namespace
}  // namespace callgate
