// Static values in the form that kernels see.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include "core/attributes.h"

namespace callgate {
namespace {

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

}  // namespace
}  // namespace callgate
