// SPDX-License-Identifier: Apache-2.0
// The framing of 2020: bytes written out by hand, everything there and back, and hostile bytes.
// tests/python/compat/test_outfeed_2020.py compares with the msgpack package.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "channel/outfeed_2020.h"
#include "core/error.h"
#include "stream_records.h"

namespace callgate {
namespace {

using outfeed_2020::ArrayType;
using ::testing::HasSubstr;
using testing::record_of;
using testing::TemporaryFolder;

std::vector<std::uint32_t> words(const std::string& bytes) {
  std::vector<std::uint32_t> words(bytes.size() / 4);
  std::memcpy(words.data(), bytes.data(), words.size() * 4);
  return words;
}

TEST(Outfeed2020, AHeaderIsTheWordsThatTheFramingSays) {
  std::vector<ArrayType> arrays{{DType::kF32, {3, 300}}};
  std::string metadata = outfeed_2020::encode_metadata(arrays);
  // [(9, [3, 300])]: one element; two; 9; two; 3; 300 as uint16.
  EXPECT_EQ(metadata, std::string("\x91\x92\x09\x92\x03\xcd\x01\x2c", 8));
  auto header = words(outfeed_2020::encode_header(0x123456789ABCDEF0U, metadata));
  std::vector<std::uint32_t> expected(32);
  std::vector<std::uint32_t> begin{2178, 0x12345678, 0x9ABCDEF0, 8, 0x91920992, 0x03CD012C};
  std::copy(begin.begin(), begin.end(), expected.begin());
  EXPECT_EQ(header, expected);
}

TEST(Outfeed2020, DTypeCodesAreThoseOfTheFraming) {
  const char* names[] = {"int8",    "int16",    "int32",  "int64",     "uint8",
                         "uint16",  "uint32",   "uint64", "float16",   "float32",
                         "float64", "bfloat16", "bool",   "complex64", "complex128"};
  for (std::uint32_t code = 0; code < 15; ++code) {
    EXPECT_EQ(outfeed_2020::code_of(*dtype_from_name(names[code])), code);
    EXPECT_EQ(outfeed_2020::dtype_of(code), dtype_from_name(names[code]));
  }
  EXPECT_EQ(outfeed_2020::code_of(DType::kS4), std::nullopt);
  EXPECT_EQ(outfeed_2020::dtype_of(15), std::nullopt);
}

TEST(Outfeed2020, MetadataOfAnyLengthGoesThereAndBack) {
  for (std::size_t count : {0, 1, 15, 16, 27, 28, 29, 60, 70'000}) {
    std::vector<ArrayType> arrays(count, {DType::kU16, {1, 200, 70'000, std::int64_t{1} << 40}});
    for (std::size_t i = 0; i < count; ++i) arrays[i].dims.resize(i % 5);
    std::string metadata = outfeed_2020::encode_metadata(arrays);
    std::string header = outfeed_2020::encode_header(5, metadata);
    outfeed_2020::Header read = outfeed_2020::decode_header(header);
    ASSERT_EQ(read.size(), header.size());
    EXPECT_EQ(outfeed_2020::metadata_of(read, header), metadata);
    EXPECT_EQ(outfeed_2020::decode_metadata(metadata), arrays);
  }
}

TEST(Outfeed2020, HeadersGrowByWholeBlocks) {
  for (auto [metadata, blocks] : {std::pair{0, 1}, {112, 1}, {113, 2}, {240, 2}, {241, 3}}) {
    std::string text(static_cast<std::size_t>(metadata), 'm');
    EXPECT_EQ(outfeed_2020::encode_header(1, text).size(), 128U * static_cast<unsigned>(blocks));
  }
}

TEST(Outfeed2020, HostileMetadataIsRefusedOrRead) {
  std::vector<ArrayType> arrays{
      {DType::kF32, {3, 300}}, {DType::kPred, {}}, {DType::kU8, {1 << 20}}};
  const std::string valid = outfeed_2020::encode_metadata(arrays);
  std::mt19937_64 random(3);
  for (int round = 0; round < 50'000; ++round) {
    std::string bytes = valid;
    for (int changes = 0; changes < 2; ++changes)
      bytes[random() % bytes.size()] = static_cast<char>(random());
    bytes.resize(random() % (bytes.size() + 1));
    std::vector<char> exact(bytes.begin(), bytes.end());  // the sanitizer sees a step beyond
    try {
      outfeed_2020::decode_metadata({exact.data(), exact.size()});
    } catch (const Error&) {
    }
  }
  EXPECT_THROW(outfeed_2020::decode_metadata("\xdd\xff\xff\xff\xff"), Error);
  EXPECT_THROW(outfeed_2020::decode_metadata(valid + "x"), Error);
}

TEST(Outfeed2020, ASinkWritesWhatAReaderReads) {
  TemporaryFolder folder;
  Source fields;
  fields.id = (std::uint64_t{9} << 32) | 4;
  fields.leaves = {testing::leaf("a", DType::kBF16, {3}), testing::leaf("b", DType::kC128, {2, 0}),
                   testing::leaf("c", DType::kS64, {}), testing::leaf("", DType::kPred, {})};
  fields.value_leaves = 3;
  fields.has_where = true;
  auto source = testing::finished(std::move(fields));
  auto sent = record_of(*source, 0), kept_back = record_of(*source, 1);
  sent.payload->at(source->leaves[3].offset) = 1;
  kept_back.payload->at(source->leaves[3].offset) = 0;
  std::vector<Record> records{sent.record, kept_back.record, sent.record};
  Outfeed2020Sink sink(folder / "feed");
  sink.consume(records);
  Outfeed2020Reader reader(folder / "feed");
  for (int i = 0; i < 2; ++i) {
    auto message = reader.next();
    ASSERT_TRUE(message);
    EXPECT_EQ(message->consumer, source->id);
    std::vector<ArrayType> types{{DType::kBF16, {3}}, {DType::kC128, {2, 0}}, {DType::kS64, {}}};
    EXPECT_EQ(message->arrays, types);
    EXPECT_EQ(message->data, std::string(sent.record.data(source->leaves[0]), 6) +
                                 std::string(sent.record.data(source->leaves[2]), 8));
    EXPECT_FALSE(message->end);
  }
  EXPECT_FALSE(reader.next());
  sink.close();
  auto end = reader.next();
  ASSERT_TRUE(end);
  EXPECT_TRUE(end->end);
  EXPECT_FALSE(reader.next());
}

TEST(Outfeed2020, AFileCutAnywhereGivesItsWholeMessages) {
  TemporaryFolder folder;
  auto source = testing::scalar_source();
  auto owned = record_of(*source, 0);
  {
    Outfeed2020Sink sink(folder / "feed");
    std::vector<Record> records(3, owned.record);
    sink.consume(records);
  }
  std::string whole = testing::contents(folder / "feed");
  ASSERT_EQ(whole.size(), 3U * 132U + 128U);
  for (std::size_t cut = 0; cut < whole.size(); ++cut) {
    testing::write_contents(folder / "cut", whole.substr(0, cut));
    Outfeed2020Reader reader(folder / "cut");
    std::size_t messages = 0;
    while (reader.next()) ++messages;
    EXPECT_EQ(messages, std::min<std::size_t>(cut / 132, 3));
  }
}

TEST(Outfeed2020, ADTypeThatTheFramingLacksIsNamedAndTheOtherRecordsAreWritten) {
  TemporaryFolder folder;
  Source fields;
  fields.id = 3;
  fields.name = "nibbles";
  fields.leaves = {testing::leaf("", DType::kS4, {4})};
  auto bad = testing::finished(std::move(fields)), good = testing::scalar_source();
  auto first = record_of(*bad, 0), second = record_of(*good, 1);
  std::vector<Record> records{first.record, second.record};
  Outfeed2020Sink sink(folder / "feed");
  try {
    sink.consume(records);
    FAIL() << "int4 was written";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("nibbles"));
    EXPECT_THAT(error.what(), HasSubstr("int4"));
  }
  Outfeed2020Reader reader(folder / "feed");
  auto message = reader.next();
  ASSERT_TRUE(message);
  EXPECT_EQ(message->consumer, good->id);
}

TEST(Outfeed2020, WhatIsNoHeaderIsAnErrorWithItsPlace) {
  TemporaryFolder folder;
  testing::write_contents(folder / "feed", std::string(200, 'x'));
  Outfeed2020Reader reader(folder / "feed");
  try {
    reader.next();
    FAIL() << "read";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("at byte 0"));
    EXPECT_THAT(error.what(), HasSubstr("2178"));
  }
  EXPECT_THROW(Outfeed2020Reader(folder / "none"), Error);
  EXPECT_THROW(Outfeed2020Sink(folder / "no/folder"), Error);
}

}  // namespace
}  // namespace callgate
