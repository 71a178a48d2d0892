// SPDX-License-Identifier: Apache-2.0
// Static values in the form that kernels see.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include "core/attributes.h"
#include "core/call.h"
#include "core/error.h"
#include "fake_attributes.h"

namespace callgate {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Integers = fake::Attribute::Integers;

template <typename T>
T number(const callgate_attribute& attribute) {
  T value;
  std::memcpy(&value, attribute.data, sizeof value);
  return value;
}

TEST(Attributes, HoldNumbersOfAnyType) {
  Attributes attributes;
  double pi = 3.25;
  bool yes = true;
  std::array<float, 2> z = {1, -2};
  attributes.add_number("pi", DType::kF64, &pi);
  attributes.add_number("yes", DType::kPred, &yes);
  attributes.add_number("z", DType::kC64, z.data());
  pi = 0;  // they are copies
  const callgate_attribute* found = attributes.find("pi");
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->kind, CALLGATE_NUMBER);
  EXPECT_EQ(found->dtype, static_cast<int>(DType::kF64));
  EXPECT_EQ(found->count, 1U);
  EXPECT_EQ(number<double>(*found), 3.25);
  EXPECT_EQ(number<bool>(*attributes.find("yes")), true);
  EXPECT_EQ((number<std::array<float, 2>>(*attributes.find("z"))), z);
}

TEST(Attributes, ElementsAreAlignedForTheirType) {
  Attributes attributes;
  std::array<double, 3> values = {1, 2, 3};
  for (const char* name : {"a", "ab", "abc", "abcd"}) {
    attributes.add_numbers(name, DType::kF64, values.data(), values.size());
    auto data = reinterpret_cast<std::uintptr_t>(attributes.find(name)->data);
    EXPECT_EQ(data % alignof(double), 0U) << name;
  }
}

TEST(Attributes, HoldArraysAndEmptyOnes) {
  Attributes attributes;
  std::array<std::int32_t, 3> values = {4, 5, 6};
  attributes.add_numbers("some", DType::kS32, values.data(), 3);
  attributes.add_numbers("none", DType::kS32, nullptr, 0);
  const callgate_attribute& some = *attributes.find("some");
  EXPECT_EQ(some.kind, CALLGATE_NUMBERS);
  EXPECT_EQ(some.count, 3U);
  EXPECT_EQ(static_cast<const std::int32_t*>(some.data)[2], 6);
  EXPECT_EQ(attributes.find("none")->count, 0U);
}

TEST(Attributes, HoldStringsWithAnyBytes) {
  Attributes attributes;
  attributes.add_string("text", std::string_view("a\0b", 3));
  attributes.add_string("empty", "");
  const callgate_attribute& text = *attributes.find("text");
  EXPECT_EQ(text.kind, CALLGATE_STRING);
  EXPECT_EQ(std::string_view(static_cast<const char*>(text.data), text.count),
            std::string_view("a\0b", 3));
  EXPECT_EQ(attributes.find("empty")->count, 0U);
}

TEST(Attributes, ADictionaryIsSortedByNameWhateverTheOrderItWasMadeIn) {
  Attributes entries;
  for (const char* name : {"m", "z", "a", "k"}) entries.add_string(name, name);
  Attributes attributes;
  attributes.add_dictionary("all", std::move(entries));
  const callgate_attribute& all = *attributes.find("all");
  ASSERT_EQ(all.kind, CALLGATE_DICTIONARY);
  ASSERT_EQ(all.count, 4U);
  const auto* entry = static_cast<const callgate_attribute*>(all.data);
  std::string names;
  for (std::size_t i = 0; i < all.count; ++i) names += entry[i].name;
  EXPECT_EQ(names, "akmz");
}

TEST(Attributes, DictionariesNest) {
  Attributes inner, middle, attributes;
  std::int64_t seven = 7;
  inner.add_number("seven", DType::kS64, &seven);
  middle.add_dictionary("inner", std::move(inner));
  attributes.add_dictionary("middle", std::move(middle));
  attributes.add_dictionary("empty", Attributes());
  const auto* found = static_cast<const callgate_attribute*>(attributes.find("middle")->data);
  ASSERT_STREQ(found->name, "inner");
  const auto* deepest = static_cast<const callgate_attribute*>(found->data);
  ASSERT_STREQ(deepest->name, "seven");
  EXPECT_EQ(number<std::int64_t>(*deepest), 7);
  EXPECT_EQ(attributes.find("empty")->count, 0U);
}

TEST(Attributes, WhatIsNotThereIsNull) {
  Attributes attributes;
  EXPECT_EQ(attributes.find("x"), nullptr);
  attributes.add_string("xy", "");
  EXPECT_EQ(attributes.find("x"), nullptr);
  EXPECT_EQ(attributes.find("xyz"), nullptr);
  EXPECT_EQ(attributes.size(), 1U);
}

TEST(Attributes, MovingKeepsWhatWasFound) {
  Attributes attributes;
  attributes.add_string("text", "kept");
  const void* data = attributes.find("text")->data;
  Attributes moved = std::move(attributes);
  EXPECT_EQ(moved.find("text")->data, data);
  EXPECT_EQ(std::memcmp(data, "kept", 4), 0);
}

TEST(Attributes, AreReadAsWhatTheyHaveToBe) {
  const Attributes held = fake::decoded({{"text", "loss"},
                                         {"yes", true},
                                         {"number", 7},
                                         {"numbers", Integers{1, 2}},
                                         {"bytes", fake::Attribute::bytes({1})},
                                         {"more", fake::AttributeMap{{"inner", 3}}}});
  EXPECT_EQ(held.text("text"), "loss");
  EXPECT_TRUE(held.flag("yes"));
  EXPECT_EQ(held.integer("number"), 7);
  EXPECT_THAT(held.integers("numbers"), ElementsAre(1, 2));
  EXPECT_THAT(held.bytes("bytes"), ElementsAre(std::byte{1}));
  EXPECT_EQ(held.dictionary("more").integer("inner"), 3);
}

TEST(Attributes, ThatAreMissingAreEmpty) {
  const Attributes held;
  EXPECT_EQ(held.text("x"), "");
  EXPECT_FALSE(held.flag("x"));
  EXPECT_EQ(held.integer("x", 5), 5);
  EXPECT_TRUE(held.integers("x").empty());
  EXPECT_TRUE(held.bytes("x").empty());
  EXPECT_EQ(held.dictionary("x").size(), 0U);
  EXPECT_TRUE(held.places().empty());
}

TEST(Attributes, OfAnotherKindAreErrorsThatNameThem) {
  const Attributes held =
      fake::decoded({{"text", "loss"}, {"number", 7}, {"numbers", Integers{1}}});
  auto message = [](auto read) -> std::string {
    try {
      read();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_THAT(message([&] { held.text("number"); }),
              HasSubstr("'number': expected a string, got one int64"));
  EXPECT_THAT(message([&] { held.flag("number"); }), HasSubstr("'number': expected one bool"));
  EXPECT_THAT(message([&] { held.integer("text"); }), HasSubstr("'text': expected one int64"));
  EXPECT_THAT(message([&] { held.integers("number"); }), HasSubstr("expected an array of int64"));
  EXPECT_THAT(message([&] { held.bytes("numbers"); }), HasSubstr("expected an array of uint8"));
  EXPECT_THAT(message([&] { held.dictionary("text"); }), HasSubstr("expected a dictionary"));
}

TEST(Attributes, AListGoesAsFarAsItsPlaces) {
  const Attributes held = fake::decoded({{"0", "a"}, {"1", "b"}, {"3", "d"}});
  EXPECT_THAT(held.places(), ElementsAre("0", "1"));
}

TEST(Attributes, ADictionaryThatIsTakenIsGone) {
  Attributes held = fake::decoded({{"more", fake::AttributeMap{{"inner", 3}}}, {"other", 1}});
  const Attributes taken = held.take_dictionary("more");
  EXPECT_EQ(taken.integer("inner"), 3);
  EXPECT_EQ(held.find("more"), nullptr);
  EXPECT_EQ(held.integer("other"), 1);
  EXPECT_EQ(held.take_dictionary("more").size(), 0U);
}

TEST(Mesh, HasTheAxesInTheirOrder) {
  const Integers sizes{2, 4};
  const Mesh mesh = Mesh::of(fake::decoded(
      {{"devices", 8}, {"names", fake::Attribute::listed({"y", "x"})}, {"sizes", sizes}}));
  EXPECT_EQ(mesh.devices, 8);
  EXPECT_THAT(mesh.axes, ElementsAre(std::pair("y", 2), std::pair("x", 4)));
  EXPECT_EQ(Mesh::of(Attributes()).devices, 1);
  EXPECT_THROW(Mesh::of(fake::decoded({{"sizes", sizes}})), Error);
  const Integers none{0};
  EXPECT_THROW(
      Mesh::of(fake::decoded({{"names", fake::Attribute::listed({"x"})}, {"sizes", none}})), Error);
}

}  // namespace
}  // namespace callgate
