// SPDX-License-Identifier: Apache-2.0
// The .npy sink: files that NumPy's format describes, after every batch and after every fault.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "channel/sinks/npy.h"
#include "core/error.h"
#include "fake_records.h"

namespace callgate {
namespace {

struct Loaded {
  NpyHeader header;
  std::string data;

  template <typename T>
  std::vector<T> as() const {
    std::vector<T> values(data.size() / sizeof(T));
    std::memcpy(values.data(), data.data(), data.size());
    return values;
  }
};

Loaded load(const std::string& path) {
  std::string text = read_text(path);
  Loaded loaded{NpyHeader::parse(text, path), {}};
  loaded.data = text.substr(loaded.header.bytes);
  return loaded;
}

std::string message(NpySink& sink, const std::vector<Record>& records) {
  try {
    sink.consume(records);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

Bytes floats(std::vector<float> values) { return bytes_of(values); }

TEST(NpyHeader, IsAlignedAndReadsBack) {
  for (const std::vector<std::int64_t>& row :
       {std::vector<std::int64_t>{}, {3}, {3, 0, 1LL << 40}, std::vector<std::int64_t>(64, 1)}) {
    NpyHeader header{"<f4", row, 12345, 0};
    std::string text = header.text();
    EXPECT_EQ(text.size() % 64, 0U);
    EXPECT_EQ(text.back(), '\n');
    NpyHeader parsed = NpyHeader::parse(text, "here");
    EXPECT_EQ(parsed.descr, "<f4");
    EXPECT_EQ(parsed.row, row);
    EXPECT_EQ(parsed.rows, 12345U);
    EXPECT_EQ(parsed.bytes, text.size());
    parsed.rows = UINT64_MAX / 2;
    EXPECT_EQ(parsed.text().size(), text.size());  // there is room for any number of rows
  }
}

TEST(NpyHeader, HoldsWhatNumpyWrites) {
  NpyHeader header{"<i8", {}, 3, 0};
  EXPECT_NE(header.text().find("{'descr': '<i8', 'fortran_order': False, 'shape': (3,), }"),
            std::string::npos);
  header.row = {2, 5};
  EXPECT_NE(header.text().find("'shape': (3, 2, 5), }"), std::string::npos);
}

TEST(NpyHeader, OtherFilesAreErrorsThatNameThem) {
  std::string good = NpyHeader{"<f4", {2}, 1, 0}.text();
  auto changed = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    return text.replace(text.find(from), from.size(), to);
  };
  for (const std::string& text :
       {std::string(), std::string("{}"), good.substr(0, 9), good.substr(0, 100),
        changed("False", "True "), changed("(1, 2)", "()    "), changed("(1, 2)", "(1, a)"),
        changed("(1, 2)", "(1, -2"), changed("'shape'", "'shade'"), changed("'<f4'", "[<f4]")}) {
    EXPECT_THROW(NpyHeader::parse(text, "here"), Error) << text;
  }
}

TEST(NpyHeader, DtypesThatNumpyLacksAreWidened) {
  const std::vector<std::pair<DType, std::string>> table{
      {DType::kPred, "|b1"},   {DType::kS8, "|i1"},       {DType::kU16, "<u2"},
      {DType::kS64, "<i8"},    {DType::kF16, "<f2"},      {DType::kC128, "<c16"},
      {DType::kBF16, "<f4"},   {DType::kS4, "|i1"},       {DType::kU2, "|u1"},
      {DType::kF8E5M2, "<f4"}, {DType::kF4E2M1FN, "<f4"},
  };
  for (const auto& [dtype, descr] : table) EXPECT_EQ(npy_descr(dtype), descr);
}

TEST(Npy, EachRecordIsARow) {
  TemporaryFolder folder;
  FakeTap tap("w", DType::kF32, {2});
  NpySink sink(folder.file("w.npy"), FileMode::kCreate);
  for (int batch = 0; batch < 3; ++batch) {
    auto first = static_cast<float>(batch);
    sink.consume(std::vector{tap.record({floats({first, 1})}), tap.record({floats({first, 2})})});
    Loaded loaded = load(folder.file("w.npy"));  // readable after each batch
    EXPECT_EQ(loaded.header.rows, 2U * static_cast<unsigned>(batch + 1));
    EXPECT_EQ(loaded.header.row, std::vector<std::int64_t>{2});
  }
  EXPECT_EQ(load(folder.file("w.npy")).as<float>(),
            (std::vector<float>{0, 1, 0, 2, 1, 1, 1, 2, 2, 1, 2, 2}));
}

TEST(Npy, ScalarsMakeAVectorAndLanesMakeRows) {
  TemporaryFolder folder;
  FakeTap tap("x", DType::kS4, {3, 2});
  tap.where({3}).lanes({3}, {1, 1});
  NpySink sink(folder.file("x.npy"), FileMode::kCreate);
  sink.consume(std::vector{
      tap.record({Bytes{0x21, static_cast<char>(0x87), static_cast<char>(0xff)}, Bytes{1, 1, 0}})});
  Loaded loaded = load(folder.file("x.npy"));
  EXPECT_EQ(loaded.header.descr, "|i1");
  EXPECT_EQ(loaded.header.rows, 2U);
  EXPECT_EQ(loaded.as<std::int8_t>(), (std::vector<std::int8_t>{1, 2, 7, -8}));
}

TEST(Npy, SmallFloatsAreFloat32) {
  TemporaryFolder folder;
  FakeTap tap("x", DType::kBF16, {});
  NpySink sink(folder.file("x.npy"), FileMode::kCreate);
  sink.consume(std::vector{tap.record({bytes_of(std::vector<std::uint16_t>{0xc000})})});
  EXPECT_EQ(load(folder.file("x.npy")).as<float>(), std::vector<float>{-2});
}

TEST(Npy, ManyRowsArriveWhole) {
  TemporaryFolder folder;
  FakeTap tap("x", DType::kF64, {3});
  NpySink sink(folder.file("x.npy"), FileMode::kCreate);
  std::vector<double> expected;
  std::vector<Record> records;
  for (int i = 0; i < 100000; ++i) {  // several times what is written at once
    std::vector<double> row{i * 0.5, i * 1.5, i * 2.5};
    expected.insert(expected.end(), row.begin(), row.end());
    records.push_back(tap.record({bytes_of(row)}));
  }
  sink.consume(records);
  EXPECT_EQ(load(folder.file("x.npy")).as<double>(), expected);
}

TEST(Npy, ANameInThePathMakesAFileALeaf) {
  TemporaryFolder folder;
  FakeTap tap("a/b");
  tap.leaf("['w']", DType::kF32, {}).leaf("['n'][0]", DType::kS32, {});
  NpySink sink(folder.file("out/{name}.npy"), FileMode::kCreate);
  sink.consume(std::vector{tap.record({floats({0.5}), bytes_of(std::vector<std::int32_t>{3})})});
  EXPECT_EQ(load(folder.file("out/a_b_w.npy")).as<float>(), std::vector<float>{0.5});
  EXPECT_EQ(load(folder.file("out/a_b_n_0.npy")).as<std::int32_t>(), std::vector<std::int32_t>{3});
}

TEST(Npy, ASecondLeafInOneFileIsAnErrorThatNamesBoth) {
  TemporaryFolder folder;
  FakeTap x("x", DType::kF32, {}), y("y", DType::kF32, {});
  NpySink sink(folder.file("x.npy"), FileMode::kCreate);
  std::string text =
      message(sink, {x.record({floats({1})}), y.record({floats({2})}), x.record({floats({3})})});
  EXPECT_NE(text.find("'x' only"), std::string::npos) << text;
  EXPECT_NE(text.find("'y'"), std::string::npos) << text;
  EXPECT_EQ(load(folder.file("x.npy")).as<float>(), (std::vector<float>{1, 3}));
}

TEST(Npy, AChangeOfShapeOrDtypeIsAnError) {
  TemporaryFolder folder;
  FakeTap vector("x", DType::kF32, {2}), longer("x", DType::kF32, {3}), half("x", DType::kF16, {2});
  NpySink sink(folder.file("x.npy"), FileMode::kCreate);
  EXPECT_EQ(message(sink, {vector.record({floats({1, 2})})}), "");
  std::string text = message(sink, {longer.record({floats({1, 2, 3})})});
  EXPECT_NE(text.find("rows of <f4[2], got rows of <f4[3]"), std::string::npos) << text;
  text = message(sink, {half.record({Bytes(4)})});
  EXPECT_NE(text.find("got rows of <f2[2]"), std::string::npos) << text;
  EXPECT_EQ(load(folder.file("x.npy")).as<float>(), (std::vector<float>{1, 2}));
}

TEST(Npy, ARecordIsTakenWholeOrNotAtAll) {
  TemporaryFolder folder;
  FakeTap tap("t"), other("t");
  tap.leaf("['a']", DType::kF32, {}).leaf("['b']", DType::kF32, {});
  other.leaf("['a']", DType::kF32, {}).leaf("['b']", DType::kF32, {1});
  NpySink sink(folder.file("{name}.npy"), FileMode::kCreate);
  EXPECT_EQ(message(sink, {tap.record({floats({1}), floats({2})})}), "");
  EXPECT_NE(message(sink, {other.record({floats({3}), floats({4})})}), "");
  EXPECT_EQ(load(folder.file("t_a.npy")).as<float>(), std::vector<float>{1});
}

TEST(Npy, ATapThatIsTracedAgainWithFewerLeavesKeepsItsRows) {
  TemporaryFolder folder;
  FakeTap both("t"), one("t");
  both.leaf("['a']", DType::kF32, {}).leaf("['b']", DType::kF32, {});
  one.leaf("['b']", DType::kF32, {});
  NpySink sink(folder.file("{name}.npy"), FileMode::kCreate);
  sink.consume(std::vector{both.record({floats({1}), floats({2})})});
  sink.consume(std::vector{one.record({floats({3})})});
  EXPECT_EQ(load(folder.file("t_b.npy")).as<float>(), (std::vector<float>{2, 3}));
  EXPECT_EQ(sink.lost(), 0U);
}

TEST(Npy, FilesGrowOnAfterClose) {
  TemporaryFolder folder;
  FakeTap tap("x", DType::kF32, {});
  NpySink sink(folder.file("x.npy"), FileMode::kCreate);
  sink.consume(std::vector{tap.record({floats({1})})});
  sink.close();
  sink.close();
  sink.consume(std::vector{tap.record({floats({2})})});
  sink.close();
  NpySink(folder.file("x.npy"), FileMode::kAppend).consume(std::vector{tap.record({floats({3})})});
  EXPECT_EQ(load(folder.file("x.npy")).as<float>(), (std::vector<float>{1, 2, 3}));
  FakeTap doubles("x", DType::kF64, {});
  NpySink wrong(folder.file("x.npy"), FileMode::kAppend);
  EXPECT_NE(message(wrong, {doubles.record({Bytes(8)})}), "");
  EXPECT_EQ(load(folder.file("x.npy")).as<float>(), (std::vector<float>{1, 2, 3}));
}

TEST(Npy, ATornFileGoesOnAfterItsLastWholeRow) {
  TemporaryFolder folder;
  const std::string path = folder.file("x.npy");
  FakeTap tap("x", DType::kF32, {2});
  NpySink(path, FileMode::kCreate)
      .consume(std::vector{tap.record({floats({1, 2})}), tap.record({floats({3, 4})})});
  const std::string whole = read_text(path);
  // Rows that the header does not count, and a row that it counts and the file lacks.
  for (const std::string& torn : {whole + "abc", whole + std::string(20, 'x')}) {
    write_text(path, torn);
    NpySink(path, FileMode::kAppend).consume(std::vector{tap.record({floats({5, 6})})});
    EXPECT_EQ(load(path).as<float>(), (std::vector<float>{1, 2, 3, 4, 5, 6}));
  }
  write_text(path, whole.substr(0, whole.size() - 3));
  NpySink(path, FileMode::kAppend).consume(std::vector{tap.record({floats({5, 6})})});
  EXPECT_EQ(load(path).as<float>(), (std::vector<float>{1, 2, 5, 6}));
  EXPECT_EQ(load(path).header.rows, 2U);
}

TEST(Npy, AFileOfAnotherKindIsAnErrorAndStays) {
  TemporaryFolder folder;
  write_text(folder.file("x.npy"), "not an array");
  FakeTap tap("x", DType::kF32, {});
  NpySink sink(folder.file("x.npy"), FileMode::kAppend);
  EXPECT_NE(message(sink, {tap.record({floats({1})})}).find("another kind of file"),
            std::string::npos);
  EXPECT_EQ(read_text(folder.file("x.npy")), "not an array");
}

}  // namespace
}  // namespace callgate
