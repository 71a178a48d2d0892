// SPDX-License-Identifier: Apache-2.0
// Taps as programs call them: the attributes that describe a call site, and callees behind the FFI
// handlers, driven by the fake XLA.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "channel/tap.h"
#include "channel_fixtures.h"
#include "core/call.h"
#include "fake_xla.h"

namespace callgate {
namespace {

using fake::kLimit;
using Integers = fake::Attribute::Integers;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// -- the attributes -------------------------------------------------------------------------------

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "no error";
}

TapSpec spec_of(fake::AttributeMap held) {
  return TapSpec::of(fake::decoded(std::move(held)), "left as it is");
}

TEST(TapSpec, EveryFieldIsRead) {
  const Integers whole{8, 4}, starts{0, 0, 4, 0};
  const fake::AttributeMap padded{{"leaf", 0}, {"whole", whole}, {"starts", starts}};
  TapSpec spec = spec_of(fake::with(fake::tap("loss", {"['w']", "a=b"},
                                              {{"role", "cotangent"},
                                               {"ordered", true},
                                               {"repeated", true},
                                               {"every", 10},
                                               {"returned", 1},
                                               {"where", true}}),
                                    {{"padded", fake::Attribute::listed({padded})}}));
  EXPECT_EQ(spec.name, "loss");
  EXPECT_EQ(spec.role, Role::kCotangent);
  EXPECT_TRUE(spec.ordered);
  EXPECT_TRUE(spec.repeated);
  EXPECT_EQ(spec.every, 10);
  EXPECT_EQ(spec.value_leaves, 2U);
  EXPECT_EQ(spec.returned, 1U);
  EXPECT_TRUE(spec.has_where);
  EXPECT_FALSE(spec.on_device);
  EXPECT_THAT(spec.paths, ElementsAre("['w']", "a=b"));
  ASSERT_EQ(spec.padded.size(), 1U);
  EXPECT_EQ(spec.padded[0].leaf, 0U);
  EXPECT_THAT(spec.padded[0].whole, ElementsAre(8, 4));
  EXPECT_THAT(spec.padded[0].starts, ElementsAre(ElementsAre(0, 0), ElementsAre(4, 0)));
  EXPECT_EQ(spec.description, "left as it is");
}

TEST(TapSpec, WhatIsNotThereHasItsDefault) {
  for (const fake::AttributeMap& held : {fake::AttributeMap{}, fake::tap("", {})}) {
    TapSpec spec = spec_of(held);
    EXPECT_EQ(spec.every, 1);
    EXPECT_EQ(spec.value_leaves, 0U);
    EXPECT_EQ(spec.role, Role::kPrimal);
    EXPECT_THAT(spec.padded, IsEmpty());
  }
}

TEST(TapSpec, AnotherFormIsAnErrorThatShowsIt) {
  auto with_padded = [](std::vector<fake::Attribute> padded) {
    return fake::with(fake::tap("t", {"a"}), {{"padded", fake::Attribute::listed(padded)}});
  };
  const fake::AttributeMap leaf{{"leaf", 0}};
  const struct {
    fake::AttributeMap held;
    const char* shown;
  } cases[] = {
      {{{"tap", "loss"}}, "'tap': expected a dictionary"},
      {fake::tap("t", {}, {{"role", "adjoint"}}), "primal, tangent or cotangent, got 'adjoint'"},
      {fake::tap("t", {}, {{"role", ""}}), "primal, tangent or cotangent, got ''"},
      {fake::tap("t", {}, {{"every", -1}}), "'every': expected a count, got -1"},
      {fake::tap("t", {}, {{"every", "often"}}), "'every': expected one int64"},
      {fake::tap("t", {}, {{"returned", true}}), "'returned': expected one int64"},
      {fake::tap("t", {}, {{"where", 1}}), "'where': expected one bool"},
      {fake::tap("t", {}, {{"repeated", "yes"}}), "'repeated': expected one bool"},
      {fake::tap("t", {"a", 7}), "'1': expected a string"},
      {with_padded({{{{"leaf", -1}}}}), "'leaf': expected a count, got -1"},
      {with_padded({{{{"leaf", 0}, {"starts", Integers{1}}}}}), "as there are extents, got 1"},
      {with_padded({{{{"leaf", 0}, {"whole", Integers{1, 2}}, {"starts", Integers(3)}}}}),
       "as there are extents, got 3"},
      {with_padded({{{{"leaf", 0}, {"whole", Integers{-2}}}}}),
       "'padded': expected counts, got -2"},
      {with_padded({{{{"leaf", 0}, {"whole", Integers{2}}, {"starts", Integers{-1}}}}}),
       "'padded': expected counts, got -1"},
      {with_padded({leaf}), "a leaf of its values"},
      {with_padded({leaf, leaf}), "a leaf of its values"},
  };
  for (const auto& [held, shown] : cases)
    EXPECT_THAT(message_of([&] { spec_of(held); }), HasSubstr(shown));
}

// -- the call ------------------------------------------------------------------------------------

// The content of a record, leaf by leaf, and lane by lane.
struct Seen {
  std::string name, description;
  std::vector<std::string> paths;
  std::vector<float> first;  // of the first leaf, whole
  std::vector<std::pair<std::int64_t, float>> lanes;
  Record record;
};

class Reader final : public Consumer {
 public:
  void consume(std::span<const Record> records) override {
    for (const Record& record : records) {
      const Source& source = *record.source;
      Seen one{source.name, source.description, {}, {}, {}, record};
      for (const LeafType& leaf : source.leaves) one.paths.push_back(leaf.path);
      RecordViews views(source);
      ArrayView first = views.whole(record)[0];
      one.first.resize(first.size());
      if (first.nbytes() != 0) std::memcpy(one.first.data(), first.data, first.nbytes());
      views.each_lane(record, [&](std::int64_t lane, std::span<const ArrayView> leaves) {
        EXPECT_EQ(leaves.size(), source.value_leaves);
        one.lanes.emplace_back(lane, *static_cast<const float*>(leaves[0].data));
      });
      seen.push_back(std::move(one));
    }
  }
  std::vector<Seen> seen;
};

// A tap with an open channel; `records()` waits for what was sent.
class Taps : public ::testing::Test {
 public:
  ~Taps() override {
    slot_.vacate(*channel_);
    EXPECT_TRUE(channel_->close(kLimit));
    Registry::instance().remove(*tap_);
    EXPECT_EQ(fake::Runtime::instance().live_errors.load(), 0);
  }

 protected:
  Taps() {
    slot_.open(channel_);
    channel_->add(reader_);
    Registry::instance().add(tap_);
  }
  const std::vector<Seen>& records() {
    EXPECT_TRUE(channel_->flush(kLimit));
    return reader_->seen;
  }

  ChannelSlot& slot_ = Channels::instance().slot("test.taps");
  std::shared_ptr<Channel> channel_ = fake::make_channel(OnFull::kBlock, 1 << 16);
  std::shared_ptr<Reader> reader_ = std::make_shared<Reader>();
  std::shared_ptr<TapCallee> tap_ = std::make_shared<TapCallee>("tap", "test.taps", nullptr);
};

fake::Array floats(std::vector<float>& memory, std::vector<std::int64_t> dims) {
  return {XLA_FFI_DataType_F32, std::move(dims), memory.data()};
}

TEST_F(Taps, ARecordIsACopyOfTheOperands) {
  fake::Loaded<fake::Program> program("tap", fake::tap("loss", {"['a']", "['b']"}));
  std::vector<float> a = {1, 2, 3}, b = {4};
  program.run({floats(a, {3}), floats(b, {})});
  a = {7, 8, 9};  // the program goes on
  ASSERT_EQ(records().size(), 1U);
  const Seen& seen = records()[0];
  EXPECT_THAT(seen.first, ElementsAre(1, 2, 3));
  EXPECT_EQ(seen.name, "loss");
  EXPECT_EQ(seen.description, "{}");
  EXPECT_THAT(seen.paths, ElementsAre("['a']", "['b']"));
  EXPECT_EQ(seen.record.device, 3) << "as the fake XLA says";
  EXPECT_EQ(seen.record.run, 77);
  EXPECT_EQ(seen.record.flags, 0U);
}

TEST_F(Taps, LanesOfAnOpenExtentAreThoseOfTheOperands) {
  fake::Loaded<fake::Program> program(
      "tap", fake::with(fake::tap("l", {""}), {{"batch", fake::levels("-1:1")}}));
  std::vector<float> x = {5, 6, 7};
  program.run({floats(x, {3})});
  ASSERT_EQ(records().size(), 1U);
  EXPECT_THAT(records()[0].lanes,
              ElementsAre(std::pair{0, 5.0F}, std::pair{1, 6.0F}, std::pair{2, 7.0F}));
  EXPECT_EQ(records()[0].record.source->lanes.text(), "3:1") << "as streams hold it";
}

TEST_F(Taps, EmptyArraysAndRepeatedTapsArrive) {
  fake::Loaded<fake::Program> program(
      "tap", fake::tap("e", {""}, {{"repeated", true}, {"role", "tangent"}}));
  program.run({{XLA_FFI_DataType_F32, {2, 0}, nullptr}});
  // No lane of an empty array is read: the reader above would.
  EXPECT_TRUE(channel_->flush(kLimit));
  ASSERT_EQ(records().size(), 1U);
  EXPECT_EQ(records()[0].record.flags, std::uint32_t{kRepeated});
  EXPECT_THAT(records()[0].first, IsEmpty());
}

TEST_F(Taps, AShardsNumberIsInItsFlagsAndCopiesSendNothing) {
  fake::Loaded<fake::Program> program(
      "tap",
      fake::with(fake::tap("s", {""}, {{"repeated", true}, {"returned", 1}}), {{"shards", "10"}}));
  std::vector<float> x = {5}, y = {0};
  for (std::uint32_t number : {1U, 0U}) {
    y[0] = 0;
    fake::Array partition{XLA_FFI_DataType_U32, {}, &number};
    program.run({floats(x, {}), partition}, {floats(y, {})});
    EXPECT_EQ(y[0], 5) << "the value passes, whoever sends it";
  }
  ASSERT_EQ(records().size(), 1U);
  EXPECT_EQ(records()[0].record.flags, kRepeated | 1U << kShardBit);
}

TEST_F(Taps, WhereSendsNothingUnlessItIsTrue) {
  fake::Loaded<fake::Program> program("tap", fake::tap("w", {""}, {{"where", true}}));
  std::vector<float> x = {0};
  for (int i = 0; i < 6; ++i) {
    x[0] = static_cast<float>(i);
    char yes = i % 3 == 0;
    program.run({floats(x, {}), {XLA_FFI_DataType_PRED, {}, &yes}});
  }
  ASSERT_EQ(records().size(), 2U);
  EXPECT_THAT(records()[1].lanes, ElementsAre(std::pair{0, 3.0F}));
  EXPECT_EQ(channel_->stats().sent, 2U) << "what is not asked for is not dropped";
}

TEST_F(Taps, EverySendsTheFirstOfEachSoMany) {
  fake::Loaded<fake::Program> program("tap", fake::tap("e", {""}, {{"every", 3}}));
  std::vector<float> x = {0};
  for (int i = 0; i < 8; ++i) {
    x[0] = static_cast<float>(i);
    program.run({floats(x, {})});
  }
  std::vector<float> sent;
  for (const Seen& seen : records()) sent.push_back(seen.first[0]);
  EXPECT_THAT(sent, ElementsAre(0, 3, 6));
}

TEST_F(Taps, EachDeviceCountsItsOwnExecutions) {
  std::shared_ptr<Site> site =
      tap_->specialise(fake::site_spec(fake::tap("e", {""}, {{"every", 3}})));
  std::vector<float> x = {0};
  for (int step = 0; step < 7; ++step) {
    for (std::int32_t device : {0, 1, 2048}) {  // ids of other processes' devices are far apart
      x[0] = static_cast<float>(step);
      ArrayView view{x.data(), nullptr, 0, DType::kF32};
      CallContext context;
      context.device = device;
      ASSERT_NO_THROW(site->run(Call{{&view, 1}, {}, context}));
    }
  }
  std::vector<float> sent;
  for (const Seen& seen : records()) sent.push_back(seen.first[0]);
  EXPECT_THAT(sent, ElementsAre(0, 0, 0, 3, 3, 3, 6, 6, 6));
}

TEST_F(Taps, LanesAreOneRecordAndThePredicateChoosesAmongThem) {
  fake::Program program("tap", fake::with(fake::tap("v", {""}, {{"where", true}}),
                                          {{"batch", fake::levels("2:10;3:11")}}));
  ASSERT_TRUE(program.load().ok());
  std::vector<float> x(6);
  std::iota(x.begin(), x.end(), 0.0F);
  char mask[3] = {1, 0, 1};  // of the inner level alone
  fake::Array where = {XLA_FFI_DataType_PRED, {3}, mask};
  program.run({floats(x, {2, 3}), where});
  std::memset(mask, 0, sizeof(mask));
  ASSERT_TRUE(program.execute({floats(x, {2, 3}), where}).wait().ok()) << "no lane: no record";
  ASSERT_EQ(records().size(), 1U);
  EXPECT_EQ(records()[0].first.size(), 6U);
  EXPECT_THAT(records()[0].lanes, ElementsAre(std::pair{0, 0.0F}, std::pair{2, 2.0F},
                                              std::pair{3, 3.0F}, std::pair{5, 5.0F}));
}

TEST_F(Taps, InTheFlowOfDataResultsAreTheOperands) {
  // One value, returned; a predicate; an untapped operand that passes through.
  fake::Loaded<fake::Program> program("tap",
                                      fake::tap("f", {""}, {{"returned", 1}, {"where", true}}));
  std::vector<float> x = {1, 2}, untapped = {3, 4, 5}, y(2), passed(3);
  char yes = 0;
  fake::Array where = {XLA_FFI_DataType_PRED, {}, &yes};
  auto run = [&] {
    return program.execute({floats(x, {2}), where, floats(untapped, {3})},
                           {floats(y, {2}), floats(passed, {3})});
  };
  ASSERT_TRUE(run().wait().ok());
  EXPECT_EQ(y, x) << "sent or not";
  EXPECT_EQ(passed, untapped);
  yes = 1;
  x = {6, 7};
  ASSERT_TRUE(run().wait().ok());
  EXPECT_EQ(y, x);
  ASSERT_EQ(records().size(), 1U);
  EXPECT_THAT(records()[0].first, ElementsAre(6, 7));
}

TEST_F(Taps, AResultInItsOperandsMemoryIsLeftAlone) {
  fake::Loaded<fake::Program> program("tap", fake::tap("f", {""}, {{"returned", 1}}));
  std::vector<float> x = {1, 2};
  program.run({floats(x, {2})}, {floats(x, {2})});
  EXPECT_THAT(x, ElementsAre(1, 2));
  EXPECT_EQ(records().size(), 1U);
}

TEST_F(Taps, CallsThatDoNotFitTheirDescriptionAreErrors) {
  std::vector<float> x = {1, 2}, y(1);
  auto message = [&](fake::AttributeMap held, std::vector<fake::Array> operands,
                     std::vector<fake::Array> results, const char* batch = "") {
    held.emplace("batch", fake::levels(batch));
    fake::Loaded<fake::Program> program("tap", std::move(held));
    return program.execute(std::move(operands), std::move(results)).wait().message;
  };
  EXPECT_THAT(message(fake::tap("a", {"", ""}), {floats(x, {2})}, {}),
              HasSubstr("tap 'a': expected at least 2 operands, got 1"));
  EXPECT_THAT(message(fake::tap("b", {""}, {{"returned", 1}}), {floats(x, {2})}, {}),
              HasSubstr("tap 'b': expected at least 1 results, got 0"));
  EXPECT_THAT(message(fake::tap("c", {""}, {{"returned", 1}}), {floats(x, {2})}, {floats(y, {})}),
              HasSubstr("float32[2], got float32[]"));
  EXPECT_THAT(message(fake::tap("d", {""}, {{"where", true}}), {floats(x, {2}), floats(y, {})}, {}),
              HasSubstr("expected bool as its predicate, got float32[]"));
  EXPECT_THAT(message(fake::tap("e", {""}), {floats(x, {2})}, {}, "3:1"), HasSubstr("float32[2]"));
  EXPECT_THAT(message(fake::tap("f", {""}), {floats(x, {2})}, {}, "#3:0"),
              HasSubstr("tap 'f': expected at least 2 operands, got 1"));
  EXPECT_THAT(message(fake::tap("g", {""}), {floats(x, {2}), floats(y, {})}, {}, "#3:00"),
              HasSubstr("an int32 as the number of its lane, got float32[]"));
  EXPECT_THAT(records(), IsEmpty());
}

TEST_F(Taps, AnotherFormIsAnErrorAtLoad) {
  fake::Program program("tap", fake::tap("a", {}, {{"every", "often"}}));
  fake::Status status = program.load();
  EXPECT_EQ(status.code, XLA_FFI_Error_Code_INVALID_ARGUMENT);
  EXPECT_THAT(status.message, HasSubstr("'every'"));
}

TEST_F(Taps, ATapToAFunctionHasItsOwnConsumer) {
  auto own = std::make_shared<Reader>();
  auto callee = std::make_shared<TapCallee>("own", "test.taps", own);
  Registry::instance().add(callee);
  std::weak_ptr<Reader> watch = own;
  {
    fake::Program to_function("own", fake::tap("f", {""}));
    fake::Program to_channel("tap", fake::tap("c", {""}));
    ASSERT_TRUE(to_function.load().ok() && to_channel.load().ok());
    std::vector<float> x = {5};
    to_function.run({floats(x, {})});
    to_channel.run({floats(x, {})});
    EXPECT_EQ(records().size(), 2U);
    EXPECT_EQ(own->seen.size(), 1U);
  }
  Registry::instance().remove(*callee);
  callee.reset();
  own.reset();
  EXPECT_TRUE(fake::eventually([&] { return watch.expired(); }))
      << "the program is gone, and so is the function";
}

TEST_F(Taps, AProgramOutlivesItsChannelAndFindsTheNext) {
  fake::Loaded<fake::Program> program("tap", fake::tap("p", {""}));
  std::vector<float> x = {1};
  program.run({floats(x, {})});
  EXPECT_EQ(records().size(), 1U);
  slot_.vacate(*channel_);
  ASSERT_TRUE(channel_->close(kLimit));
  x = {2};
  program.run({floats(x, {})});
  channel_ = fake::make_channel();
  slot_.open(channel_);
  channel_->add(reader_);
  ASSERT_EQ(records().size(), 2U);
  EXPECT_THAT(records()[1].first, ElementsAre(2));
}

TEST_F(Taps, TapsAreQuietWhenTheProcessEnds) { EXPECT_TRUE(tap_->quiet_at_exit()); }

}  // namespace
}  // namespace callgate
