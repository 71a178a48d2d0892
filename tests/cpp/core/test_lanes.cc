// SPDX-License-Identifier: Apache-2.0
// Lanes against a brute-force oracle: the strides of the whole array, written out.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/lanes.h"
#include "fake_attributes.h"

namespace callgate {
namespace {

using Dims = std::vector<std::int64_t>;

// Row-major offset of `index`, in elements.
std::int64_t offset(const Dims& dims, const Dims& index) {
  std::int64_t flat = 0;
  for (std::size_t axis = 0; axis < dims.size(); ++axis) flat = flat * dims[axis] + index[axis];
  return flat;
}

// Every index of an array of extents `dims`, in row-major order.
std::vector<Dims> all_indices(const Dims& dims) {
  std::vector<Dims> indices{{}};
  for (std::int64_t extent : dims) {
    std::vector<Dims> longer;
    for (const Dims& index : indices) {
      for (std::int64_t i = 0; i < extent; ++i) {
        longer.push_back(index);
        longer.back().push_back(i);
      }
    }
    indices = longer;
  }
  return indices;
}

// An array with the leading axes of some levels, and what a lane of it should be.
struct Whole {
  std::vector<bool> batched;  // per level
  Dims element;               // extents of one lane
  Dims dims;                  // extents of the whole
  std::vector<std::int32_t> memory;

  Whole(const Dims& sizes, std::vector<bool> mask, Dims element_dims)
      : batched(std::move(mask)), element(std::move(element_dims)) {
    for (std::size_t level = 0; level < sizes.size(); ++level) {
      if (batched[level]) dims.push_back(sizes[level]);
    }
    dims.insert(dims.end(), element.begin(), element.end());
    auto size = std::accumulate(dims.begin(), dims.end(), std::int64_t{1}, std::multiplies<>());
    memory.resize(static_cast<std::size_t>(size) + 1);  // never a null pointer
  }

  ArrayView view() {
    return {memory.data(), dims.data(), static_cast<std::int32_t>(dims.size()), DType::kS32};
  }

  void expect_lane(const ArrayView& lane, const Dims& lane_index) {
    Dims index;
    for (std::size_t level = 0; level < batched.size(); ++level) {
      if (batched[level]) index.push_back(lane_index[level]);
    }
    index.resize(dims.size(), 0);
    EXPECT_EQ(lane.data, memory.data() + offset(dims, index));
    EXPECT_EQ(Dims(lane.shape().begin(), lane.shape().end()), element);
    EXPECT_EQ(lane.dtype, DType::kS32);
  }
};

// A random call with lanes.
struct RandomCall {
  Dims sizes;
  std::string text;
  std::vector<Whole> operands, results;

  explicit RandomCall(std::mt19937& random) {
    auto up_to = [&random](int top) { return std::uniform_int_distribution<int>(0, top)(random); };
    auto element = [&] {
      Dims dims(static_cast<std::size_t>(up_to(2)));
      for (std::int64_t& extent : dims) extent = up_to(3);
      return dims;
    };
    sizes.resize(static_cast<std::size_t>(up_to(3)));
    for (std::int64_t& size : sizes) size = up_to(3);
    std::vector<std::vector<bool>> masks(static_cast<std::size_t>(up_to(4)));
    for (auto& mask : masks) {
      for (std::size_t level = 0; level < sizes.size(); ++level) mask.push_back(up_to(1) == 1);
      operands.emplace_back(sizes, mask, element());
    }
    for (int count = up_to(2); count >= 0; --count) {
      results.emplace_back(sizes, std::vector<bool>(sizes.size(), true), element());
    }
    for (std::size_t level = 0; level < sizes.size(); ++level) {
      text += (level == 0 ? "" : ";") + std::to_string(sizes[level]) + ":";
      for (const auto& mask : masks) text += mask[level] ? '1' : '0';
    }
  }
};

std::vector<ArrayView> views(std::vector<Whole>& arrays) {
  std::vector<ArrayView> result;
  for (Whole& array : arrays) result.push_back(array.view());
  return result;
}

TEST(Lanes, NameTheIndexInEachLevel) {
  EXPECT_EQ(fake::lanes("").name(0), "");
  EXPECT_EQ(fake::lanes("6:1").name(5), "lane 5");
  EXPECT_EQ(fake::lanes("2:1;3:1").name(5), "lane (1, 2)");
  EXPECT_EQ(fake::lanes("2:1;3:1;4:1").name(13), "lane (1, 0, 1)");
}

TEST(Lanes, SelectsWhatTheStridesSay) {
  std::mt19937 random(20240229);
  for (int round = 0; round < 400; ++round) {
    RandomCall call(random);
    SCOPED_TRACE("'" + call.text + "', round " + std::to_string(round));
    Lanes lanes = fake::lanes(call.text);
    std::vector<ArrayView> operands = views(call.operands), results = views(call.results);
    ASSERT_NO_THROW(lanes.check(operands, results));

    std::vector<Dims> indices = all_indices(call.sizes);
    ASSERT_EQ(lanes.count(), static_cast<std::int64_t>(indices.size()));
    std::vector<ArrayView> lane(operands.size()), lane_results(results.size());
    for (std::size_t i = 0; i < indices.size(); ++i) {
      lanes.select_operands(static_cast<std::int64_t>(i), operands, lane);
      lanes.select_results(static_cast<std::int64_t>(i), results, lane_results);
      for (std::size_t k = 0; k < lane.size(); ++k)
        call.operands[k].expect_lane(lane[k], indices[i]);
      for (std::size_t k = 0; k < lane_results.size(); ++k)
        call.results[k].expect_lane(lane_results[k], indices[i]);
    }
  }
}

TEST(Lanes, CheckRefusesEveryWrongLeadingExtent) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    RandomCall call(random);
    Lanes lanes = fake::lanes(call.text);
    for (std::vector<Whole>* side : {&call.operands, &call.results}) {
      for (Whole& array : *side) {
        std::size_t leading = array.dims.size() - array.element.size();
        for (std::size_t axis = 0; axis < leading; ++axis) {
          ++array.dims[axis];
          EXPECT_THROW(lanes.check(views(call.operands), views(call.results)), Error) << call.text;
          --array.dims[axis];
        }
      }
    }
    EXPECT_NO_THROW(lanes.check(views(call.operands), views(call.results))) << call.text;
  }
}

TEST(Lanes, CheckRefusesMissingAxesAndOperands) {
  Dims dims{3, 4};
  std::vector<int> memory(12);
  ArrayView whole{memory.data(), dims.data(), 2, DType::kS32};
  ArrayView vector{memory.data(), dims.data(), 1, DType::kS32};
  std::vector<ArrayView> two{whole, whole}, one{whole}, flat{vector};
  Lanes lanes = fake::lanes("3:1;4:1");
  EXPECT_NO_THROW(lanes.check(one, one));
  EXPECT_THROW(lanes.check(two, one), Error);
  EXPECT_THROW(lanes.check({}, one), Error);
  EXPECT_THROW(lanes.check(flat, one), Error);
  EXPECT_THROW(lanes.check(one, flat), Error);
}

TEST(Lanes, CheckNamesTheArrayThatIsWrong) {
  Dims dims{3}, wrong{5};
  std::int32_t memory[5] = {};
  std::vector<ArrayView> operands{{memory, dims.data(), 1, DType::kS32},
                                  {memory, wrong.data(), 1, DType::kS32}};
  try {
    fake::lanes("3:11").check(operands, {});
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("operand 1"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("int32[5]"), std::string::npos) << error.what();
  }
}

TEST(Lanes, CheckRefusesLanesThatStartWithinAByte) {
  Dims odd{2, 3}, even{2, 4};
  std::uint8_t memory[8] = {};
  std::vector<ArrayView> split{{memory, odd.data(), 2, DType::kS4}};
  std::vector<ArrayView> whole{{memory, even.data(), 2, DType::kS4}};
  EXPECT_THROW(fake::lanes("2:1").check(split, whole), Error);
  EXPECT_THROW(fake::lanes("2:1").check(whole, split), Error);
  EXPECT_NO_THROW(fake::lanes("2:1").check(whole, whole));
  EXPECT_NO_THROW(fake::lanes("2:0").check(split, whole));  // shared, so never cut
}

TEST(Lanes, WithoutLevelsThereIsOneLaneAndNothingToCheck) {
  for (const Lanes& lanes : {Lanes(), fake::lanes("")}) {
    EXPECT_TRUE(lanes.empty());
    EXPECT_EQ(lanes.count(), 1);
    EXPECT_NO_THROW(lanes.check(std::vector<ArrayView>(3), std::vector<ArrayView>(2)));
  }
}

TEST(Lanes, LevelsWithoutOperandsStillCount) {
  EXPECT_EQ(fake::lanes("3:;4:").count(), 12);
  EXPECT_FALSE(fake::lanes("3:").empty());
  EXPECT_EQ(fake::lanes("0:;4:").count(), 0);
}

// Some of a call's levels, at random, are left open, where an operand tells them.
TEST(Lanes, OpenExtentsAreThoseOfTheCallsOperands) {
  std::mt19937 random(11);
  int opened = 0;
  for (int round = 0; round < 400; ++round) {
    RandomCall call(random);
    std::istringstream levels(call.text);
    std::string text, level;
    for (std::size_t n = 0; std::getline(levels, level, ';'); ++n) {
      const std::string mask = level.substr(level.find(':'));
      const bool open = random() % 2 == 0 && mask.find('1') != std::string::npos;
      opened += open;
      text += (n == 0 ? "" : ";") + (open ? "-1" + mask : level);
    }
    SCOPED_TRACE("'" + text + "', round " + std::to_string(round));
    const std::vector<ArrayView> operands = views(call.operands), results = views(call.results);
    const Lanes held = fake::lanes(text);
    EXPECT_EQ(held.open(), text != call.text);
    const LanesOfCall lanes(held, operands, results);
    EXPECT_EQ(lanes->text(), call.text);
    EXPECT_EQ(lanes->count(), fake::lanes(call.text).count());
  }
  EXPECT_GT(opened, 100);
}

TEST(Lanes, OpenExtentsThatNoOperandTellsOrThatDifferAreRefused) {
  Dims dims{3}, other{5}, many{INT64_MAX, INT64_MAX};
  std::int32_t memory[5] = {};
  const std::vector<ArrayView> one{{memory, dims.data(), 1, DType::kS32}};
  const std::vector<ArrayView> two{one[0], {memory, other.data(), 1, DType::kS32}};
  const std::vector<ArrayView> scalar{{memory, dims.data(), 0, DType::kS32}};
  const std::vector<ArrayView> large{{memory, many.data(), 2, DType::kS32}};
  auto read = [](const char* text, const std::vector<ArrayView>& operands) {
    LanesOfCall(fake::lanes(text), operands, {});
  };
  EXPECT_NO_THROW(read("-1:1", one));
  EXPECT_THROW(read("-1:11", two), Error);
  EXPECT_THROW(read("-1:1", scalar), Error);
  EXPECT_THROW(read("-1:0", one), Error);
  EXPECT_THROW(read("-1:1", {}), Error);
  EXPECT_THROW(read("-1:1;-1:1", one), Error);
  EXPECT_THROW(read("-1:1;-1:1", large), Error) << "more than 2^63 lanes";
  EXPECT_THROW(fake::lanes("-1:1").check(one, {}), Error) << "they are to be read first";
}

// Some of a call's levels, at random, are numbered: all calls together have each lane once.
TEST(Lanes, NumberedLevelsCountInPositionsAndAreNoAxes) {
  std::mt19937 random(5);
  for (int round = 0; round < 400; ++round) {
    std::string text;
    Dims sizes, own, numbered;
    std::vector<bool> is_numbered;
    for (std::uint64_t levels = 1 + random() % 4; levels > 0; --levels) {
      sizes.push_back(1 + static_cast<std::int64_t>(random() % 3));
      is_numbered.push_back(random() % 2 == 0);
      (is_numbered.back() ? numbered : own).push_back(sizes.back());
      text.append(text.empty() ? "" : ";").append(is_numbered.back() ? "#" : "");
      text += std::to_string(sizes.back()) + (is_numbered.back() ? ":0" : ":1");
    }
    SCOPED_TRACE("'" + text + "', round " + std::to_string(round));
    const Lanes lanes = fake::lanes(text);
    Whole array(own, std::vector<bool>(own.size(), true), {2});
    const std::vector<ArrayView> whole{array.view()};
    const std::vector<Dims> every = all_indices(sizes), of_call = all_indices(own);
    EXPECT_EQ(lanes.has_numbered(), !numbered.empty());
    EXPECT_EQ(lanes.total(), std::ssize(every));
    EXPECT_EQ(lanes.axes(), std::ssize(own));
    ASSERT_EQ(lanes.count(), std::ssize(of_call));
    std::vector<bool> seen(every.size());
    const std::vector<Dims> calls = all_indices(numbered);
    for (std::size_t number = 0; number < calls.size(); ++number) {
      const LanesOfCall call(lanes, whole, whole, static_cast<std::int64_t>(number));
      for (std::size_t i = 0; i < of_call.size(); ++i) {
        Dims index;
        for (std::size_t level = 0, a = 0, b = 0; level < sizes.size(); ++level)
          index.push_back(is_numbered[level] ? calls[number][a++] : of_call[i][b++]);
        const std::int64_t position = call.position(static_cast<std::int64_t>(i));
        Dims indices;
        lanes.each_index(position, [&](std::int64_t one) { indices.push_back(one); });
        EXPECT_EQ(indices, index);
        EXPECT_EQ(call.name(static_cast<std::int64_t>(i)), lanes.name(position));
        seen.at(static_cast<std::size_t>(position)) = true;
        std::vector<ArrayView> lane(1), result(1);
        call->select_operands(static_cast<std::int64_t>(i), whole, lane);
        call->select_results(static_cast<std::int64_t>(i), whole, result);
        array.expect_lane(lane[0], of_call[i]);
        array.expect_lane(result[0], of_call[i]);
      }
    }
    EXPECT_EQ(std::ranges::count(seen, true), std::ssize(every));
  }
}

TEST(Lanes, LevelsOfAnotherFormAreErrorsThatSayWhatCame) {
  using Integers = fake::Attribute::Integers;
  const struct {
    fake::AttributeMap held;
    const char* shown;
  } cases[] = {
      {{{"sizes", Integers{3}}, {"masks", Integers{2}}}, "masks of 0 and 1, got 2"},
      {{{"sizes", Integers{-2}}, {"masks", Integers{1}}}, "extents, got -2"},
      {{{"sizes", Integers{3, 4}}, {"masks", Integers{1, 0, 1}}}, "got 3 entries for 2 levels"},
      {{{"sizes", Integers{3, 4}}, {"masks", Integers{1, 0}}, {"numbered", Integers{1}}},
       "for each whether it is numbered, got 1 entries for 2 levels"},
      {{{"masks", Integers{1}}}, "got 1 entries for 0 levels"},
      {{{"sizes", "3"}}, "'sizes': expected an array of int64"},
      {{{"sizes", 3}}, "'sizes': expected an array of int64"},
      {{{"sizes", fake::Attribute::bytes({3})}}, "'sizes': expected an array of int64"},
  };
  for (const auto& [held, shown] : cases) {
    try {
      Lanes::of(fake::decoded(held));
      ADD_FAILURE() << "no error: " << shown;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find(shown), std::string::npos) << error.what();
    }
  }
}

TEST(Lanes, MoreLanesThanCanBeCountedAreAnError) {
  EXPECT_THROW(fake::lanes("4294967296:1;4294967296:1"), Error);
  EXPECT_EQ(fake::lanes("4294967296:1;2147483647:1").count(), 4294967296 * 2147483647);
}

TEST(Lanes, MasksHaveOneEntryPerLevelAndOperand) {
  std::vector<std::int64_t> three{1, 0, 1};
  EXPECT_THROW(Lanes({2, 2}, three), Error);
  EXPECT_THROW(Lanes({}, three), Error);
  EXPECT_NO_THROW(Lanes({2}, three));
}

}  // namespace
}  // namespace callgate
