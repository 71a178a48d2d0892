// SPDX-License-Identifier: Apache-2.0
// The JSON Lines sink: what its lines say, and what is in the file when something goes wrong.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "channel/sinks/jsonl.h"
#include "channel/sinks/leaves.h"
#include "core/error.h"
#include "fake_records.h"

namespace callgate {
namespace {

std::string json_of(DType dtype, std::vector<std::int64_t> dims, Bytes bytes) {
  bytes.push_back(0);  // never a null pointer
  std::string out;
  append_json_array(
      out, ArrayView{bytes.data(), dims.data(), static_cast<std::int32_t>(dims.size()), dtype});
  return out;
}

template <typename T>
std::string json_of(DType dtype, const std::vector<T>& values) {
  return json_of(dtype, {static_cast<std::int64_t>(values.size())}, bytes_of(values));
}

TEST(Json, NumbersAreTheShortestThatReadBack) {
  EXPECT_EQ(json_of(DType::kF32, std::vector<float>{0.1F, 1.0F, -0.0F, 1e20F, 3.4028235e38F}),
            "[0.1,1.0,-0.0,1e+20,3.4028235e+38]");
  EXPECT_EQ(json_of(DType::kF64, std::vector<double>{0.1, 5e-324, 1.0 / 3}),
            "[0.1,5e-324,0.3333333333333333]");
  EXPECT_EQ(json_of(DType::kS64, std::vector<std::int64_t>{INT64_MIN, 0, INT64_MAX}),
            "[-9223372036854775808,0,9223372036854775807]");
  EXPECT_EQ(json_of(DType::kU64, std::vector<std::uint64_t>{UINT64_MAX}), "[18446744073709551615]");
  EXPECT_EQ(json_of(DType::kPred, std::vector<std::uint8_t>{0, 1, 255}), "[false,true,true]");
}

TEST(Json, FloatsRoundTrip) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 20000; ++i) {
    auto number = std::bit_cast<double>(random());
    if (!std::isfinite(number)) continue;
    std::string text = json_of(DType::kF64, {}, bytes_of(std::vector<double>{number}));
    ASSERT_EQ(std::strtod(text.c_str(), nullptr), number) << text;
    auto single = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    if (!std::isnormal(single)) continue;
    text = json_of(DType::kF32, {}, bytes_of(std::vector<float>{single}));
    ASSERT_EQ(std::stof(text), single) << text;
  }
}

TEST(Json, WhatIsNoNumberIsAString) {
  const double inf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(json_of(DType::kF64, std::vector<double>{NAN, inf, -inf}),
            R"(["NaN","Infinity","-Infinity"])");
  EXPECT_EQ(json_of(DType::kC64, std::vector<std::complex<float>>{{1.5F, NAN}}),
            R"([[1.5,"NaN"]])");
}

TEST(Json, SmallFloatsHaveTheirValues) {
  using Raw16 = std::vector<std::uint16_t>;
  using Raw8 = std::vector<std::uint8_t>;
  EXPECT_EQ(json_of(DType::kF16, Raw16{0x3c00, 0xc000, 0x7bff, 0x0001, 0x7c00, 0xfe00}),
            R"([1.0,-2.0,65504.0,5.9604645e-08,"Infinity","NaN"])");
  EXPECT_EQ(json_of(DType::kBF16, Raw16{0x3f80, 0xbdcd, 0xff80}),
            R"([1.0,-0.100097656,"-Infinity"])");
  EXPECT_EQ(json_of(DType::kF8E5M2, Raw8{0x3c, 0x7b, 0x7c, 0x7d, 0x01}),
            R"([1.0,57344.0,"Infinity","NaN",1.5258789e-05])");
  EXPECT_EQ(json_of(DType::kF8E4M3FN, Raw8{0x38, 0x7e, 0x7f, 0xb8}), R"([1.0,448.0,"NaN",-1.0])");
  EXPECT_EQ(json_of(DType::kF8E4M3FNUZ, Raw8{0x40, 0x7f, 0x80}), R"([1.0,240.0,"NaN"])");
  EXPECT_EQ(json_of(DType::kF8E5M2FNUZ, Raw8{0x40, 0x7f, 0x80}), R"([1.0,57344.0,"NaN"])");
  EXPECT_EQ(json_of(DType::kF8E4M3B11FNUZ, Raw8{0x58, 0x7f}), "[1.0,30.0]");
  EXPECT_EQ(json_of(DType::kF8E4M3, Raw8{0x38, 0x77, 0x78}), R"([1.0,240.0,"Infinity"])");
  EXPECT_EQ(json_of(DType::kF8E3M4, Raw8{0x30, 0x6f, 0x70}), R"([1.0,15.5,"Infinity"])");
  EXPECT_EQ(json_of(DType::kF8E8M0FNU, Raw8{0x7f, 0x80, 0xff}), R"([1.0,2.0,"NaN"])");
}

TEST(Json, PackedElementsAreUnpackedFromTheLowBits) {
  using Raw8 = std::vector<std::uint8_t>;
  EXPECT_EQ(json_of(DType::kS4, {3}, bytes_of(Raw8{0x87, 0x0f})), "[7,-8,-1]");
  EXPECT_EQ(json_of(DType::kU4, {2, 2}, bytes_of(Raw8{0x87, 0x0f})), "[[7,8],[15,0]]");
  EXPECT_EQ(json_of(DType::kS2, {4}, bytes_of(Raw8{0b11100100})), "[0,1,-2,-1]");
  EXPECT_EQ(json_of(DType::kU2, {4}, bytes_of(Raw8{0b11100100})), "[0,1,2,3]");
  EXPECT_EQ(json_of(DType::kU1, {3}, bytes_of(Raw8{0b101})), "[1,0,1]");
  EXPECT_EQ(json_of(DType::kF4E2M1FN, {4}, bytes_of(Raw8{0x21, 0xf7})), "[0.5,1.0,6.0,-6.0]");
}

TEST(Json, ListsNestAsTheShape) {
  std::vector<std::int32_t> values{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  EXPECT_EQ(json_of(DType::kS32, {}, bytes_of(std::vector<std::int32_t>{5})), "5");
  EXPECT_EQ(json_of(DType::kS32, {2, 3, 2}, bytes_of(values)),
            "[[[0,1],[2,3],[4,5]],[[6,7],[8,9],[10,11]]]");
  EXPECT_EQ(json_of(DType::kS32, {0}, {}), "[]");
  EXPECT_EQ(json_of(DType::kS32, {2, 0, 3}, {}), "[[],[]]");
}

TEST(Json, AnUnknownDtypeIsAnErrorThatNamesIt) {
  EXPECT_THROW(json_of(static_cast<DType>(77), {1}, {0}), Error);
}

TEST(Names, PathsLoseTheMarksOfTheirContainers) {
  EXPECT_EQ(plain_path(""), "");
  EXPECT_EQ(plain_path("['w'][0].x"), "w/0/x");
  EXPECT_EQ(plain_path(".a.b[12]"), "a/b/12");
  EXPECT_EQ(plain_path("[<flat index 3>]['a]b']"), "3/a]b");
  EXPECT_EQ(plain_path(R"(["it's"]['a\'b\\c'][(1, 2)])"), R"(it's/a'b\c/(1, 2))");
  EXPECT_EQ(plain_path("['torn"), "torn");
}

TEST(Jsonl, ALoneLeafIsTheValueItself) {
  TemporaryFolder folder;
  FakeTap tap("lo\"ss\n", DType::kF32, {});
  JsonlSink sink(folder.file("a.jsonl"), FileMode::kCreate);
  sink.consume(std::vector{tap.record({bytes_of(std::vector{0.25F})}),
                           tap.record({bytes_of(std::vector{0.5F})}, kRepeated)});
  EXPECT_EQ(read_text(folder.file("a.jsonl")),
            R"({"name":"lo\"ss\u000a","seq":0,"time_ns":1700000000000000000,"device":0,"run":7,)"
            R"("role":"primal","value":0.25})"
            "\n"
            R"({"name":"lo\"ss\u000a","seq":1,"time_ns":1700000000000000001,"device":0,"run":7,)"
            R"("role":"primal","repeated":true,"value":0.5})"
            "\n");
}

// The line without its head: from the lane, or the value, on.
std::vector<std::string> tails(const std::string& text) {
  std::vector<std::string> found;
  for (std::size_t start = 0; start < text.size();) {
    std::size_t end = text.find('\n', start);
    std::string line = text.substr(start, end - start);
    std::size_t from = line.find("\"lane\"");
    if (from == std::string::npos) from = line.find("\"value\"");
    found.push_back(line.substr(from));
    start = end + 1;
  }
  return found;
}

TEST(Jsonl, APytreeIsAnObjectOfItsPaths) {
  TemporaryFolder folder;
  FakeTap tap("grad", Role::kCotangent);
  tap.leaf("['w'][0]", DType::kS8, {2}).leaf("['b']", DType::kF64, {});
  FakeTap dict("d");
  dict.leaf("['only']", DType::kS8, {});
  FakeTap empty("e");
  JsonlSink sink(folder.file("a.jsonl"), FileMode::kCreate);
  sink.consume(std::vector{tap.record({Bytes{1, 2}, bytes_of(std::vector{0.5})}),
                           dict.record({Bytes{3}}), empty.record({})});
  std::string text = read_text(folder.file("a.jsonl"));
  EXPECT_NE(text.find(R"("role":"cotangent")"), std::string::npos);
  EXPECT_EQ(tails(text), (std::vector<std::string>{R"("value":{"w/0":[1,2],"b":0.5}})",
                                                   R"("value":{"only":3}})", R"("value":{}})"}));
}

TEST(Jsonl, EachLaneThatIsSentIsALine) {
  TemporaryFolder folder;
  FakeTap tap("x", DType::kS32, {2, 3});
  tap.where({2}).lanes({2, 3}, {1, 1, 1, 0});
  JsonlSink sink(folder.file("a.jsonl"), FileMode::kCreate);
  std::vector<std::int32_t> values{0, 1, 2, 3, 4, 5};
  sink.consume(std::vector{tap.record({bytes_of(values), Bytes{0, 1}})});
  EXPECT_EQ(tails(read_text(folder.file("a.jsonl"))),
            (std::vector<std::string>{R"("lane":[1,0],"value":3})", R"("lane":[1,1],"value":4})",
                                      R"("lane":[1,2],"value":5})"}));
}

TEST(Jsonl, RecordsAfterCloseAreAppended) {
  TemporaryFolder folder;
  const std::string path = folder.file("runs/1/a.jsonl");  // folders are made
  FakeTap tap("x", DType::kS8, {});
  JsonlSink sink(path, FileMode::kCreate);
  sink.consume(std::vector{tap.record({Bytes{1}})});
  sink.close();
  sink.close();
  sink.consume(std::vector{tap.record({Bytes{2}})});
  sink.close();
  JsonlSink(path, FileMode::kAppend).consume(std::vector{tap.record({Bytes{3}})});
  EXPECT_EQ(tails(read_text(path)),
            (std::vector<std::string>{"\"value\":1}", "\"value\":2}", "\"value\":3}"}));
  JsonlSink again(path, FileMode::kCreate);
  EXPECT_EQ(read_text(path), "");
}

TEST(Jsonl, ATornLastLineIsCutOff) {
  TemporaryFolder folder;
  const std::string path = folder.file("a.jsonl"), whole = "{\"value\":0}\n";
  FakeTap tap("x", DType::kS8, {});
  for (const std::string& torn :
       {std::string("{\"va"), std::string(R"({"a":{"b":1})"), std::string(R"({"a":"}\"})"),
        R"({"name":"big","value":[)" + std::string(200000, '1')}) {
    write_text(path, whole + torn);
    JsonlSink(path, FileMode::kAppend).consume(std::vector{tap.record({Bytes{1}})});
    EXPECT_EQ(tails(read_text(path)), (std::vector<std::string>{"\"value\":0}", "\"value\":1}"}));
    write_text(path, torn);
    JsonlSink(path, FileMode::kAppend).consume(std::vector{tap.record({Bytes{1}})});
    EXPECT_EQ(tails(read_text(path)), (std::vector<std::string>{"\"value\":1}"}));
  }
}

TEST(Jsonl, AWholeLastLineWithoutItsNewlineIsKept) {
  TemporaryFolder folder;
  const std::string path = folder.file("a.jsonl");
  write_text(path, R"({"t":"}{\"","value":0})");
  FakeTap tap("x", DType::kS8, {});
  JsonlSink(path, FileMode::kAppend).consume(std::vector{tap.record({Bytes{1}})});
  EXPECT_EQ(tails(read_text(path)), (std::vector<std::string>{"\"value\":0}", "\"value\":1}"}));
}

TEST(Jsonl, ARecordThatCannotBeWrittenLeavesTheOthers) {
  TemporaryFolder folder;
  FakeTap tap("x", DType::kS8, {}), strange("y");
  strange.leaf("['a']", DType::kS8, {}).leaf("['b']", static_cast<DType>(77), {});
  JsonlSink sink(folder.file("a.jsonl"), FileMode::kCreate);
  std::vector records{tap.record({Bytes{1}}), strange.record({Bytes{9}}), tap.record({Bytes{2}})};
  EXPECT_THROW(sink.consume(records), Error);
  EXPECT_EQ(tails(read_text(folder.file("a.jsonl"))),
            (std::vector<std::string>{"\"value\":1}", "\"value\":2}"}));
}

TEST(Jsonl, AFullDiskIsAnErrorThatNamesTheFile) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  FakeTap tap("x", DType::kS8, {});
  JsonlSink sink("/dev/full", FileMode::kAppend);
  try {
    sink.consume(std::vector{tap.record({Bytes{1}})});
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("the sink JSONL cannot write to '/dev/full'"),
              std::string::npos)
        << error.what();
  }
}

// Two sinks that append are to each other as those of two processes: each has its own open file.
TEST(Jsonl, SeveralThatAppendWriteWholeLinesAndLoseNone) {
  constexpr std::int64_t kElements = 30'000, kRecords = 300;
  TemporaryFolder folder;
  const std::string path = folder.file("a.jsonl");
  write_text(path, "{\"torn\":");  // by one that was killed
  auto write = [&](std::int8_t value) {
    FakeTap tap(value == 1 ? "a" : "b", DType::kS8, {kElements});
    const Bytes values(kElements, value);
    JsonlSink sink(path, FileMode::kAppend);
    for (std::int64_t i = 0; i < kRecords; ++i)
      sink.consume(std::vector{tap.record({values}), tap.record({values})});
  };
  {
    std::jthread first(write, std::int8_t{1}), second(write, std::int8_t{2});
  }
  std::ifstream file(path);
  std::map<char, std::int64_t> seen;  // by the first letter of the name
  for (std::string line; std::getline(file, line);) {
    ASSERT_TRUE(line.starts_with(R"({"name":")")) << line.substr(0, 40);
    const char name = line[9];
    ASSERT_NE(line.find("\"seq\":" + std::to_string(seen[name]++) + ","), std::string::npos);
    ASSERT_EQ(line.size() - line.find("\"value\":"), 2 * kElements + 10U);
    ASSERT_TRUE(line.ends_with("]}"));
  }
  EXPECT_EQ(seen, (std::map<char, std::int64_t>{{'a', 2 * kRecords}, {'b', 2 * kRecords}}));
}

TEST(Jsonl, AFileThatAnotherWritesToIsAnErrorBeforeItIsTouched) {
  TemporaryFolder folder;
  const std::string path = folder.file("a.jsonl");
  FakeTap tap("x", DType::kS8, {});
  for (FileMode mode : {FileMode::kCreate, FileMode::kAppend}) {
    JsonlSink sink(path, mode);
    JsonlSink idle(path, mode);  // has nothing to lose yet
    sink.consume(std::vector{tap.record({Bytes{1}})});
    const std::string before = read_text(path);
    EXPECT_THROW(JsonlSink(path, FileMode::kCreate), Error);
    if (mode == FileMode::kCreate) {
      EXPECT_THROW(JsonlSink(path, FileMode::kAppend), Error);
      EXPECT_THROW(idle.open(), Error);
      EXPECT_THROW(idle.consume(std::vector{tap.record({Bytes{2}})}), Error);
      EXPECT_EQ(idle.lost(), 1U);
    }
    EXPECT_EQ(read_text(path), before);
    sink.close();
    idle.consume(std::vector{tap.record({Bytes{3}})});  // it is free now
    EXPECT_EQ(tails(read_text(path)).back(), "\"value\":3}");
  }
}

TEST(Jsonl, APathThatCannotBeOpenedIsAnErrorAtOnce) {
  TemporaryFolder folder;
  write_text(folder.file("file"), "");
  EXPECT_THROW(JsonlSink(folder.file("file") + "/a.jsonl", FileMode::kCreate), Error);
}

}  // namespace
}  // namespace callgate
