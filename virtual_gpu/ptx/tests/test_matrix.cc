// SPDX-License-Identifier: Apache-2.0
// mma and ldmatrix, with the manual's layouts written out here once more.
#include <algorithm>
#include <bit>
#include <ostream>
#include <random>

#include "kernel_test.h"
#include "ptx/numbers.h"

namespace vgpu::ptx {
namespace {

// An element's place in the manual's tables ("Matrix Fragments for mma"): element i of a lane with
// a group, lane / 4, and a place in it, lane % 4. By how many bits an element of A and B has.
struct At {
  std::uint32_t row, column;
};
At in_a(std::uint32_t bits, std::uint32_t group, std::uint32_t place, std::uint32_t i) {
  switch (bits) {
    case 64: return {group, place};
    case 32: return {i % 2 == 0 ? group : group + 8, i < 2 ? place : place + 4};
    case 16:
      return {i < 2 || (i >= 4 && i < 6) ? group : group + 8,
              place * 2 + (i & 1) + (i >= 4 ? 8 : 0)};
    default:
      return {i < 4 || (i >= 8 && i < 12) ? group : group + 8,
              place * 4 + (i & 3) + (i >= 8 ? 16 : 0)};
  }
}
At in_b(std::uint32_t bits, std::uint32_t group, std::uint32_t place, std::uint32_t i) {
  switch (bits) {
    case 64: return {place, group};
    case 32: return {i < 1 ? place : place + 4, group};
    case 16: return {place * 2 + (i & 1) + (i >= 2 ? 8 : 0), group};
    default: return {place * 4 + (i & 3) + (i >= 4 ? 16 : 0), group};
  }
}
At in_c(std::uint32_t group, std::uint32_t place, std::uint32_t i) {
  return {i < 2 ? group : group + 8, place * 2 + (i & 1)};
}

// A type's bits, and a value in it. All have small whole numbers exactly.
struct Element {
  std::uint32_t bits;
  std::uint64_t (*of)(double);
};
Element element(const std::string& type) {
  if (type == "f64") return {64, [](double v) { return std::bit_cast<std::uint64_t>(v); }};
  if (type == "f32" || type == "tf32") {
    return {32, [](double v) {
              return std::uint64_t{std::bit_cast<std::uint32_t>(static_cast<float>(v))};
            }};
  }
  if (type == "s32") {
    return {32, [](double v) {
              return std::uint64_t{static_cast<std::uint32_t>(static_cast<int>(v))};
            }};
  }
  if (type == "f16") return {16, [](double v) { return std::uint64_t{Half::from(v).bits}; }};
  if (type == "bf16") return {16, [](double v) { return std::uint64_t{Brain::from(v).bits}; }};
  if (type == "e4m3") return {8, [](double v) { return std::uint64_t{pack(v, kE4M3Format)}; }};
  if (type == "e5m2") return {8, [](double v) { return std::uint64_t{pack(v, kE5M2Format)}; }};
  return {8, [](double v) {  // s8, u8
            return std::uint64_t{static_cast<std::uint8_t>(static_cast<int>(v))};
          }};
}

struct Form {
  std::uint32_t m, k;
  std::string d, a, b;
  bool saturates = false;
  std::string opcode() const {
    return "mma.sync.aligned.m" + std::to_string(m) + "n8k" + std::to_string(k) + ".row.col" +
           (saturates ? ".satfinite." : ".") + d + "." + a + "." + b + "." + d;
  }
};
void PrintTo(const Form& form, std::ostream* out) { *out << form.opcode(); }

// As an operand: {%r5, %r6, ...}.
std::string registers(const std::string& name, std::uint32_t first, std::uint32_t count) {
  std::string text = "{%" + name + std::to_string(first);
  for (std::uint32_t i = 1; i < count; ++i) text += ", %" + name + std::to_string(first + i);
  return text + "}";
}

// Runs one mma of a warp: a register a word, `count` for each operand, lane by lane.
template <typename Word>
std::vector<Word> multiply(const std::string& opcode, std::uint32_t d, std::uint32_t a,
                           std::uint32_t b, const std::vector<Word>& operands) {
  const std::uint32_t in = a + b + d;
  const std::string type = ".b" + std::to_string(8 * sizeof(Word));
  auto offset = [](std::uint32_t count) { return std::to_string(sizeof(Word) * count); };
  std::string body = ".visible .entry kernel(.param .u64 out, .param .u64 in) {\n.reg " + type +
                     " %d<8>, %x<16>; .reg .b32 %t; .reg .b64 %out, %in;\nmov.u32 %t, %tid.x;\n"
                     "ld.param.u64 %out, [out]; ld.param.u64 %in, [in];\nmad.wide.u32 %out, %t, " +
                     offset(d) + ", %out;\nmad.wide.u32 %in, %t, " + offset(in) + ", %in;\n";
  for (std::uint32_t i = 0; i < in; ++i)
    body += "ld.global" + type + " %x" + std::to_string(i) + ", [%in+" + offset(i) + "];\n";
  body += opcode + " " + registers("d", 0, d) + ", " + registers("x", 0, a) + ", " +
          registers("x", a, b) + ", " + registers("x", a + b, d) + ";\n";
  for (std::uint32_t i = 0; i < d; ++i)
    body += "st.global" + type + " [%out+" + offset(i) + "], %d" + std::to_string(i) + ";\n";
  HostMemory memory;
  std::uint64_t out = memory.put(std::vector<Word>(std::size_t{32} * d));
  Outcome outcome = run_kernel(memory, body + "ret;\n}\n", {out, memory.put(operands)});
  EXPECT_EQ(outcome.message, "");
  return memory.get<Word>(out);
}

struct Matrix {
  std::uint32_t columns;
  std::vector<double> values;
  Matrix(std::uint32_t rows, std::uint32_t columns_of, unsigned seed, int lowest, int step = 1)
      : columns(columns_of), values(std::size_t{rows} * columns_of) {
    std::minstd_rand random(seed);
    for (double& each : values) each = step * (static_cast<int>(random() % 9) + lowest);
  }
  double at(At at) const { return values[at.row * columns + at.column]; }
};

template <typename Word>
void check(const Form& form) {
  const Element of_a = element(form.a), of_b = element(form.b), of_d = element(form.d);
  auto lowest = [](const std::string& type) { return type == "u8" ? 0 : -4; };
  Matrix a(form.m, form.k, 1, lowest(form.a)), b(form.k, 8, 2, lowest(form.b));
  // Near the ends, some sums saturate.
  Matrix c(form.m, 8, 3, -4, form.saturates ? 536'870'911 : 1);
  constexpr std::uint32_t kBits = 8 * sizeof(Word);
  std::vector<Word> in;
  auto words_of = [&](const Element& element, std::uint32_t rows, std::uint32_t columns) {
    return rows * columns * element.bits / 32 / kBits;
  };
  const std::uint32_t for_a = words_of(of_a, form.m, form.k), for_b = words_of(of_b, form.k, 8),
                      for_d = words_of(of_d, form.m, 8);
  for (std::uint32_t lane = 0; lane < 32; ++lane) {
    const std::uint32_t group = lane / 4, place = lane % 4;
    auto put = [&](std::uint32_t count, const Element& element, auto value) {
      const std::uint32_t each = kBits / element.bits;
      for (std::uint32_t r = 0; r < count; ++r) {
        Word word = 0;
        for (std::uint32_t j = 0; j < each; ++j)
          word |= static_cast<Word>(element.of(value(r * each + j)) << (j * element.bits));
        in.push_back(word);
      }
    };
    put(for_a, of_a, [&](auto i) { return a.at(in_a(of_a.bits, group, place, i)); });
    put(for_b, of_b, [&](auto i) { return b.at(in_b(of_b.bits, group, place, i)); });
    put(for_d, of_d, [&](auto i) { return c.at(in_c(group, place, i)); });
  }
  auto out = multiply(form.opcode(), for_d, for_a, for_b, in);
  const std::uint32_t each = kBits / of_d.bits;
  for (std::uint32_t lane = 0; lane < 32; ++lane) {
    for (std::uint32_t i = 0; i < for_d * each; ++i) {
      const At at = in_c(lane / 4, lane % 4, i);
      double want = c.at(at);
      for (std::uint32_t k = 0; k < form.k; ++k) want += a.at({at.row, k}) * b.at({k, at.column});
      if (form.saturates) want = std::clamp(want, -2147483648.0, 2147483647.0);
      const Word mask = of_d.bits == kBits ? ~Word{0} : (Word{1} << of_d.bits % kBits) - 1;
      const Word got = out[lane * for_d + i / each] >> (i % each * of_d.bits) & mask;
      EXPECT_EQ(got, static_cast<Word>(of_d.of(want))) << at.row << ", " << at.column;
    }
  }
}

class Products : public testing::TestWithParam<Form> {};

TEST_P(Products, AreThoseOfTheManualsLayouts) {
  const Form& form = GetParam();
  if (form.a == "f64") return check<std::uint64_t>(form);
  check<std::uint32_t>(form);
}

INSTANTIATE_TEST_SUITE_P(
    Matrix, Products,
    testing::Values(Form{16, 16, "f32", "f16", "f16"}, Form{16, 8, "f32", "f16", "f16"},
                    Form{16, 16, "f16", "f16", "f16"}, Form{16, 8, "f16", "f16", "f16"},
                    Form{16, 16, "f32", "bf16", "bf16"}, Form{16, 8, "f32", "bf16", "bf16"},
                    Form{16, 8, "f32", "tf32", "tf32"}, Form{16, 4, "f32", "tf32", "tf32"},
                    Form{8, 4, "f64", "f64", "f64"}, Form{16, 32, "s32", "s8", "s8"},
                    Form{16, 32, "s32", "s8", "u8"}, Form{16, 32, "s32", "u8", "s8"},
                    Form{16, 32, "s32", "u8", "u8"}, Form{16, 16, "s32", "s8", "s8"},
                    Form{16, 16, "s32", "u8", "s8"}, Form{16, 32, "s32", "s8", "s8", true},
                    Form{16, 16, "s32", "u8", "u8", true}, Form{16, 32, "f32", "e4m3", "e4m3"},
                    Form{16, 32, "f32", "e4m3", "e5m2"}, Form{16, 32, "f32", "e5m2", "e4m3"},
                    Form{16, 32, "f32", "e5m2", "e5m2"}, Form{16, 16, "f32", "e4m3", "e5m2"}));

// Matrix i, row r, column c holds 100 i + 10 r + c.
std::vector<std::uint32_t> loaded(std::uint32_t count, const std::string& transposed) {
  std::vector<std::uint16_t> values(4 * 64);
  for (std::uint32_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<std::uint16_t>(i / 64 * 100 + i / 8 % 8 * 10 + i % 8);
  HostMemory memory;
  std::uint64_t out = memory.put(std::vector<std::uint32_t>(128));
  Outcome outcome = run_kernel(
      memory,
      ".visible .entry kernel(.param .u64 out, .param .u64 in) {\n.shared .align 16 .b8 "
      "tile[512];\n"
      ".reg .b32 %r<10>, %t; .reg .b64 %out, %in;\nmov.u32 %t, %tid.x; ld.param.u64 %out, [out];\n"
      "ld.param.u64 %in, [in]; mad.wide.u32 %in, %t, 16, %in; mov.u32 %r0, tile; mad.lo.u32 %r0, "
      "%t, 16, %r0;\n"
      "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%in]; st.shared.v4.u32 [%r0], {%r1, %r2, %r3, "
      "%r4};\n"
      "bar.sync 0; ldmatrix.sync.aligned.m8n8.x" +
          std::to_string(count) + transposed + ".shared.b16 " + registers("r", 5, count) +
          ", [%r0];\n"
          "mad.wide.u32 %out, %t, 16, %out; st.global.v4.u32 [%out], {%r5, %r6, %r7, %r8}; ret; }",
      {out, memory.put(values)});
  EXPECT_EQ(outcome.message, "");
  return memory.get<std::uint32_t>(out);
}

TEST(Matrix, RowsAreLoadedFromTheAddressesOfEightLanes) {
  for (std::uint32_t count : {1U, 2U, 4U}) {
    auto plain = loaded(count, ""), transposed = loaded(count, ".trans");
    for (std::uint32_t lane = 0; lane < 32; ++lane) {
      for (std::uint32_t i = 0; i < count; ++i) {
        const std::uint32_t group = lane >> 2, place = 2 * (lane % 4);
        const std::uint32_t row = 100 * i + 10 * group + place;
        const std::uint32_t column = 100 * i + 10 * place + group;
        EXPECT_EQ(plain[4 * lane + i], row | (row + 1) << 16);
        EXPECT_EQ(transposed[4 * lane + i], column | (column + 10) << 16);
      }
    }
  }
}

// As loaded(), the other way: lane i's register r holds two halves of row i / 4 of matrix r.
void check_stored(std::uint32_t count, const std::string& transposed) {
  HostMemory memory;
  std::vector<std::uint32_t> in(128);
  for (std::uint32_t i = 0; i < 128; ++i) in[i] = (2 * i + 1) << 16 | 2 * i;
  std::uint64_t out = memory.put(std::vector<std::uint16_t>(256));
  Outcome outcome = run_kernel(
      memory,
      kernel("mad.wide.u32 %in, %t, 16, %in; mov.u32 %r0, tile; mad.lo.u32 %r0, %t, 16, %r0;\n"
             "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%in];\nstmatrix.sync.aligned.m8n8.x" +
                 std::to_string(count) + transposed + ".shared.b16 [%r0], " +
                 registers("r", 1, count) +
                 ";\nbar.sync 0;\n"
                 "ld.shared.v4.u32 {%r1, %r2, %r3, %r4}, [%r0]; mad.wide.u32 %out, %t, 12, "
                 "%out;\nst.global.v4.u32 [%out], {%r1, %r2, %r3, %r4};",
             ".shared .align 16 .b8 tile[512];\n"),
      {out, memory.put(in)});
  EXPECT_EQ(outcome.message, "");
  auto got = memory.get<std::uint16_t>(out);
  for (std::uint32_t matrix = 0; matrix < count; ++matrix) {
    for (std::uint32_t i = 0; i < 8; ++i) {
      for (std::uint32_t j = 0; j < 8; ++j) {
        const std::uint32_t row = transposed.empty() ? i : j, column = transposed.empty() ? j : i;
        const std::uint32_t word = 4 * (4 * row + column / 2) + matrix;
        EXPECT_EQ(got[64 * matrix + 8 * i + j], 2 * word + column % 2);
      }
    }
  }
}

TEST(Matrix, RowsAreStoredToTheAddressesOfEightLanes) {
  for (std::uint32_t count : {1U, 2U, 4U}) {
    for (const char* transposed : {"", ".trans"}) check_stored(count, transposed);
  }
}

TEST(Matrix, AreTransposedWithinAWarp) {
  std::vector<std::uint32_t> in;
  auto half = [](std::uint32_t row, std::uint32_t column) { return 10 * row + column; };
  for (std::uint32_t i = 0; i < 32; ++i)
    in.push_back(half(i / 4, 2 * (i % 4)) | half(i / 4, 2 * (i % 4) + 1) << 16);
  auto got = each_thread<std::uint32_t>("movmatrix.sync.aligned.m8n8.trans.b16 %out, %in0;", in);
  for (std::uint32_t i = 0; i < 32; ++i)
    EXPECT_EQ(got[i], half(2 * (i % 4), i / 4) | half(2 * (i % 4) + 1, i / 4) << 16);
}

}  // namespace
}  // namespace vgpu::ptx
