// SPDX-License-Identifier: Apache-2.0
// The statistics sink against sums written out.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "channel/sinks/stats.h"
#include "core/error.h"
#include "fake_records.h"

namespace callgate {
namespace {

TEST(Stats, MomentsAreThoseOfAllValuesHoweverTheyCome) {
  std::mt19937 random(3);
  std::normal_distribution<double> normal(1e6, 2);  // a mean that spoils the naive formula
  std::vector<double> all;
  StatsSink sink({});
  FakeTap scalar("x", DType::kF64, {}), array("x", DType::kF64, {7});
  for (int i = 0; i < 500; ++i) {
    std::vector<double> values(i % 3 == 0 ? 7 : 1);
    for (double& value : values) value = normal(random);
    all.insert(all.end(), values.begin(), values.end());
    FakeTap& tap = values.size() == 7 ? array : scalar;
    sink.consume(std::vector{tap.record({bytes_of(values)})});
  }
  double mean = std::accumulate(all.begin(), all.end(), 0.0) / static_cast<double>(all.size());
  double squares = 0;
  for (double value : all) squares += (value - mean) * (value - mean);
  Summary found = sink.read().at("x");
  EXPECT_EQ(found.records, 500U);
  EXPECT_EQ(found.count, all.size());
  EXPECT_NEAR(found.mean, mean, 1e-8);
  EXPECT_NEAR(found.variance(), squares / static_cast<double>(all.size()), 1e-6);
  EXPECT_EQ(found.min, *std::min_element(all.begin(), all.end()));
  EXPECT_EQ(found.max, *std::max_element(all.begin(), all.end()));
}

// The mean of 1, 2, 3, 4, 5 times a number is 3 and the variance 2, each record alone or all at
// once.
TEST(Stats, GreatAndTinyNumbersHaveMomentsAsLongAsThoseAreNumbers) {
  for (double unit : {1e200, 1e306, 3e307, 1e153, 1e-150, 1e-200, 1e-310}) {
    StatsSink sink({});
    FakeTap scalar("alone", DType::kF64, {}), array("at once", DType::kF64, {5});
    const std::vector<double> values{unit, 2 * unit, 3 * unit, 4 * unit, 5 * unit};
    for (double value : values)
      sink.consume(std::vector{scalar.record({bytes_of(std::vector{value})})});
    sink.consume(std::vector{array.record({bytes_of(values)})});
    for (const char* name : {"alone", "at once"}) {
      const Summary found = sink.read().at(name);
      EXPECT_NEAR(found.mean / unit, 3, 1e-9) << unit;
      const double variance = 2 * unit * unit;  // infinite beyond 1e154, as np.var's
      if (std::isnormal(variance)) {
        EXPECT_NEAR(found.variance() / variance, 1, 1e-9) << unit;
      } else {
        EXPECT_EQ(found.variance(), variance) << unit;
      }
    }
  }
}

TEST(Stats, TheVarianceOfGreatNumbersThatAreNearEachOtherIsANumber) {
  const double great = 1e160, step = great * 0x1p-50;
  StatsSink sink({});
  FakeTap tap("x", DType::kF64, {});
  for (double value : {great, great, great + step, great + step})
    sink.consume(std::vector{tap.record({bytes_of(std::vector{value})})});
  const double half = ((great + step) - great) / 2;
  EXPECT_NEAR(sink.read().at("x").variance() / half / half, 1, 1e-6);
  for (double value : {1.7e308, -1.7e308, 1.7e308})
    sink.consume(std::vector{tap.record({bytes_of(std::vector{value})})});
  const Summary found = sink.read().at("x");
  EXPECT_NEAR(found.mean, 1.7e308 / 7, 1e300);
  EXPECT_EQ(found.variance(), std::numeric_limits<double>::infinity());
}

TEST(Stats, WhatIsNoNumberIsCountedApart) {
  const float inf = std::numeric_limits<float>::infinity();
  FakeTap tap("x", DType::kF32, {5});
  StatsSink sink({});
  sink.consume(std::vector{tap.record({bytes_of(std::vector{1.0F, NAN, inf, -inf, 3.0F})})});
  Summary found = sink.read().at("x");
  EXPECT_EQ(found.count, 2U);
  EXPECT_EQ(found.nan, 1U);
  EXPECT_EQ(found.inf, 2U);
  EXPECT_EQ(found.mean, 2.0);
  EXPECT_EQ(found.max, 3.0);
  EXPECT_EQ(found.last.size(), 5U);
  EXPECT_TRUE(std::isnan(found.last[1]));
}

TEST(Stats, WithoutValuesTheMomentsAreNaN) {
  FakeTap tap("x", DType::kF32, {0});
  StatsSink sink({});
  EXPECT_TRUE(sink.read().empty());
  sink.consume(std::vector{tap.record({Bytes{}})});
  Summary found = sink.read().at("x");
  EXPECT_EQ(found.records, 1U);
  EXPECT_EQ(found.count, 0U);
  EXPECT_TRUE(std::isnan(found.variance()));
  EXPECT_EQ(found.last_dims, std::vector<std::int64_t>{0});
}

TEST(Stats, LeavesAndRolesHaveTheirOwnAndLanesCountEach) {
  FakeTap tree("t"), cotangent("t", Role::kCotangent);
  tree.leaf("['a']", DType::kS32, {3}).leaf("['b']", DType::kC64, {}).where({3});
  tree.lanes({3}, {1, 0, 1});
  cotangent.leaf("", DType::kPred, {2});
  StatsSink sink({});
  sink.consume(
      std::vector{tree.record({bytes_of(std::vector<std::int32_t>{1, 2, 4}),
                               bytes_of(std::vector<std::complex<float>>{{3, 4}}), Bytes{1, 0, 1}}),
                  cotangent.record({Bytes{0, 1}})});
  auto found = sink.read();
  ASSERT_EQ(found.size(), 3U);
  EXPECT_EQ(found.at("t/a").records, 2U);
  EXPECT_EQ(found.at("t/a").mean, 2.5);
  EXPECT_EQ(found.at("t/b").mean, 5.0);  // the absolute value
  EXPECT_EQ(found.at("t:cotangent").mean, 0.5);
  sink.clear();
  EXPECT_TRUE(sink.read().empty());
}

TEST(Stats, GivenBinsCountAsNumpysDo) {
  Histogram histogram = Histogram::of({0, 1, 2});
  for (double value : {-0.1, 0.0, 0.5, 1.0, 1.5, 2.0, 2.1}) histogram.add(value);
  EXPECT_EQ(histogram.counts, (std::vector<std::uint64_t>{2, 3}));
  EXPECT_EQ(histogram.below, 1U);
  EXPECT_EQ(histogram.above, 1U);
  for (const std::vector<double>& edges :
       {std::vector<double>{1}, {1, 1}, {2, 1}, {0, static_cast<double>(NAN)}}) {
    EXPECT_THROW(Histogram::of(edges), Error);
  }
}

TEST(Stats, BinsOfPowersOfTwoHoldEveryNumber) {
  Histogram histogram = Histogram::powers_of_two();
  const double greatest = std::numeric_limits<double>::max();
  for (double value : {0.0, 1.0, 1.99, -1.0, -1.5, 2.0, 1e-300, greatest, -greatest}) {
    histogram.add(value);
  }
  EXPECT_EQ(histogram.below + histogram.above, 0U);
  auto count = [&](double edge) {  // of the bin that begins there
    auto at = std::find(histogram.edges.begin(), histogram.edges.end(), edge);
    return histogram.counts.at(static_cast<std::size_t>(at - histogram.edges.begin()));
  };
  EXPECT_EQ(count(1), 2U);
  EXPECT_EQ(count(2), 1U);
  EXPECT_EQ(count(-2), 1U);  // -1.5
  EXPECT_EQ(count(-1), 1U);
  EXPECT_EQ(count(-std::ldexp(1, -32)), 2U);  // around zero
  EXPECT_EQ(count(std::ldexp(1, 64)), 1U);
  EXPECT_EQ(histogram.counts.front(), 1U);
}

TEST(Stats, IsReadWhileItIsFilled) {
  FakeTap tap("x", DType::kF64, {4});
  const Record record = tap.record({bytes_of(std::vector<double>{1, 2, 3, 4})});
  StatsSink sink({});
  sink.consume(std::vector{record});
  std::thread writer([&] {
    for (int i = 0; i < 2000; ++i) sink.consume(std::vector{record});
  });
  for (int i = 0; i < 500; ++i) {
    Summary found = sink.read().at("x");
    EXPECT_EQ(found.count, 4 * found.records);  // never half of a record
    EXPECT_NEAR(found.mean, 2.5, 1e-12);
  }
  writer.join();
  EXPECT_EQ(sink.read().at("x").records, 2001U);
}

}  // namespace
}  // namespace callgate
