// mma and ldmatrix, with the manual's layouts written out here once more.
#include <bit>
#include <random>

#include "kernel_test.h"
#include "ptx/numbers.h"

namespace vgpu::ptx {
namespace {

// Runs one mma of a warp: registers of 32 bits, `count` for each operand, lane by lane.
std::vector<std::uint32_t> multiply(const std::string& opcode, std::uint32_t d, std::uint32_t a,
                                    std::uint32_t b, const std::vector<std::uint32_t>& operands) {
  auto list = [](const char* name, std::uint32_t from, std::uint32_t count) {
    std::string text = "{";
    for (std::uint32_t i = 0; i < count; ++i)
      text += (i > 0 ? ", %" : "%") + std::string(name) + std::to_string(from + i);
    return text + "}";
  };
  const std::uint32_t in = a + b + d;
  std::string body =
      ".visible .entry kernel(.param .u64 out, .param .u64 in) {\n"
      ".reg .b32 %d<8>, %x<16>, %t; .reg .b64 %out, %in;\nmov.u32 %t, %tid.x;\n"
      "ld.param.u64 %out, [out]; ld.param.u64 %in, [in];\n"
      "mad.wide.u32 %out, %t, " +
      std::to_string(4 * d) +
      ", %out;\n"
      "mad.wide.u32 %in, %t, " +
      std::to_string(4 * in) + ", %in;\n";
  for (std::uint32_t i = 0; i < in; ++i) {
    body += "ld.global.u32 %x" + std::to_string(i) + ", [%in+" + std::to_string(4 * i) + "];\n";
  }
  body += opcode + " " + list("d", 0, d) + ", " + list("x", 0, a) + ", " + list("x", a, b) + ", " +
          list("x", a + b, d) + ";\n";
  for (std::uint32_t i = 0; i < d; ++i) {
    body += "st.global.u32 [%out+" + std::to_string(4 * i) + "], %d" + std::to_string(i) + ";\n";
  }
  HostMemory memory;
  std::uint64_t out = memory.put(std::vector<std::uint32_t>(32 * d));
  Outcome outcome = run_kernel(memory, body + "ret;\n}\n", {out, memory.put(operands)});
  EXPECT_EQ(outcome.message, "");
  return memory.get<std::uint32_t>(out);
}

struct Matrix {
  std::uint32_t columns;
  std::vector<double> values;
  Matrix(std::uint32_t rows, std::uint32_t columns_of, unsigned seed)
      : columns(columns_of), values(rows * columns_of) {
    std::minstd_rand random(seed);
    for (double& each : values) each = static_cast<int>(random() % 9) - 4;
  }
  double at(std::uint32_t row, std::uint32_t column) const {
    return values[row * columns + column];
  }
};

void check(const Matrix& a, const Matrix& b, const Matrix& c, std::uint32_t k, std::uint32_t row,
           std::uint32_t column, double got) {
  double want = c.at(row, column);
  for (std::uint32_t i = 0; i < k; ++i) want += a.at(row, i) * b.at(i, column);
  EXPECT_EQ(got, want) << row << ", " << column;
}

TEST(Matrix, HalvesWithSixteenColumns) {
  Matrix a(16, 16, 1), b(16, 8, 2), c(16, 8, 3);
  std::vector<std::uint32_t> in;
  auto half = [](double value) { return std::uint32_t{Half::from(value).bits}; };
  for (std::uint32_t lane = 0; lane < 32; ++lane) {
    const std::uint32_t group = lane >> 2, place = lane % 4;
    for (std::uint32_t i = 0; i < 8; i += 2) {  // the manual: a0 to a7
      const std::uint32_t row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
      const std::uint32_t column = place * 2 + (i >= 4 ? 8 : 0);
      in.push_back(half(a.at(row, column)) | half(a.at(row, column + 1)) << 16);
    }
    for (std::uint32_t i = 0; i < 4; i += 2) {  // b0 to b3
      const std::uint32_t row = place * 2 + (i >= 2 ? 8 : 0);
      in.push_back(half(b.at(row, group)) | half(b.at(row + 1, group)) << 16);
    }
    for (std::uint32_t i = 0; i < 4; ++i) {
      in.push_back(std::bit_cast<std::uint32_t>(
          static_cast<float>(c.at(i < 2 ? group : group + 8, place * 2 + (i & 1)))));
    }
  }
  auto out = multiply("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", 4, 4, 2, in);
  for (std::uint32_t lane = 0; lane < 32; ++lane) {
    for (std::uint32_t i = 0; i < 4; ++i) {
      check(a, b, c, 16, i < 2 ? lane >> 2 : (lane >> 2) + 8, (lane % 4) * 2 + (i & 1),
            std::bit_cast<float>(out[4 * lane + i]));
    }
  }
}

TEST(Matrix, Tf32WithEightColumns) {
  Matrix a(16, 8, 4), b(8, 8, 5), c(16, 8, 6);
  std::vector<std::uint32_t> in;
  auto bits = [](double value) { return std::bit_cast<std::uint32_t>(static_cast<float>(value)); };
  for (std::uint32_t lane = 0; lane < 32; ++lane) {
    const std::uint32_t group = lane >> 2, place = lane % 4;
    in.push_back(bits(a.at(group, place)));
    in.push_back(bits(a.at(group + 8, place)));
    in.push_back(bits(a.at(group, place + 4)));
    in.push_back(bits(a.at(group + 8, place + 4)));
    in.push_back(bits(b.at(place, group)));
    in.push_back(bits(b.at(place + 4, group)));
    for (std::uint32_t i = 0; i < 4; ++i)
      in.push_back(bits(c.at(i < 2 ? group : group + 8, place * 2 + (i & 1))));
  }
  auto out = multiply("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", 4, 4, 2, in);
  for (std::uint32_t lane = 0; lane < 32; ++lane) {
    for (std::uint32_t i = 0; i < 4; ++i) {
      check(a, b, c, 8, i < 2 ? lane >> 2 : (lane >> 2) + 8, (lane % 4) * 2 + (i & 1),
            std::bit_cast<float>(out[4 * lane + i]));
    }
  }
}

TEST(Matrix, BytesWithThirtyTwoColumns) {
  Matrix a(16, 32, 7), b(32, 8, 8), c(16, 8, 9);
  std::vector<std::uint32_t> in;
  auto byte = [](double value, std::uint32_t at) {
    return std::uint32_t{static_cast<std::uint8_t>(static_cast<int>(value))} << (8 * at);
  };
  for (std::uint32_t lane = 0; lane < 32; ++lane) {
    const std::uint32_t group = lane >> 2, place = lane % 4;
    for (std::uint32_t r = 0; r < 4; ++r) {
      std::uint32_t word = 0;
      for (std::uint32_t j = 0; j < 4; ++j) {
        const std::uint32_t i = 4 * r + j;  // the manual: a0 to a15
        const std::uint32_t row = i < 4 || (i >= 8 && i < 12) ? group : group + 8;
        word |= byte(a.at(row, place * 4 + (i & 3) + (i >= 8 ? 16 : 0)), j);
      }
      in.push_back(word);
    }
    for (std::uint32_t r = 0; r < 2; ++r) {
      std::uint32_t word = 0;
      for (std::uint32_t j = 0; j < 4; ++j) word |= byte(b.at(place * 4 + j + 16 * r, group), j);
      in.push_back(word);
    }
    for (std::uint32_t i = 0; i < 4; ++i)
      in.push_back(static_cast<std::uint32_t>(
          static_cast<int>(c.at(i < 2 ? group : group + 8, place * 2 + (i & 1)))));
  }
  auto out = multiply("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", 4, 4, 2, in);
  for (std::uint32_t lane = 0; lane < 32; ++lane) {
    for (std::uint32_t i = 0; i < 4; ++i) {
      check(a, b, c, 32, i < 2 ? lane >> 2 : (lane >> 2) + 8, (lane % 4) * 2 + (i & 1),
            static_cast<std::int32_t>(out[4 * lane + i]));
    }
  }
}

// Matrix i, row r, column c holds 100 i + 10 r + c.
std::vector<std::uint32_t> loaded(const std::string& transposed) {
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
      "bar.sync 0; ldmatrix.sync.aligned.m8n8.x4" +
          transposed +
          ".shared.b16 {%r5, %r6, %r7, %r8}, [%r0];\n"
          "mad.wide.u32 %out, %t, 16, %out; st.global.v4.u32 [%out], {%r5, %r6, %r7, %r8}; ret; }",
      {out, memory.put(values)});
  EXPECT_EQ(outcome.message, "");
  return memory.get<std::uint32_t>(out);
}

TEST(Matrix, RowsAreLoadedFromTheAddressesOfEightLanes) {
  auto plain = loaded(""), transposed = loaded(".trans");
  for (std::uint32_t lane = 0; lane < 32; ++lane) {
    for (std::uint32_t i = 0; i < 4; ++i) {
      const std::uint32_t group = lane >> 2, place = 2 * (lane % 4);
      const std::uint32_t row = 100 * i + 10 * group + place, column = 100 * i + 10 * place + group;
      EXPECT_EQ(plain[4 * lane + i], row | (row + 1) << 16);
      EXPECT_EQ(transposed[4 * lane + i], column | (column + 10) << 16);
    }
  }
}

// As loaded(), the other way: lane i's register r holds two halves of row i / 4 of matrix r.
TEST(Matrix, RowsAreStoredToTheAddressesOfEightLanes) {
  for (bool transposed : {false, true}) {
    HostMemory memory;
    std::vector<std::uint32_t> in(128);
    for (std::uint32_t i = 0; i < 128; ++i) in[i] = (2 * i + 1) << 16 | 2 * i;
    std::uint64_t out = memory.put(std::vector<std::uint16_t>(256));
    Outcome outcome = run_kernel(
        memory,
        kernel("mad.wide.u32 %in, %t, 16, %in; mov.u32 %r0, tile; mad.lo.u32 %r0, %t, 16, %r0;\n"
               "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%in];\nstmatrix.sync.aligned.m8n8.x4" +
                   std::string(transposed ? ".trans" : "") +
                   ".shared.b16 [%r0], {%r1, %r2, %r3, %r4};\nbar.sync 0;\n"
                   "ld.shared.v4.u32 {%r1, %r2, %r3, %r4}, [%r0]; mad.wide.u32 %out, %t, 12, "
                   "%out;\nst.global.v4.u32 [%out], {%r1, %r2, %r3, %r4};",
               ".shared .align 16 .b8 tile[512];\n"),
        {out, memory.put(in)});
    EXPECT_EQ(outcome.message, "");
    auto got = memory.get<std::uint16_t>(out);
    for (std::uint32_t matrix = 0; matrix < 4; ++matrix) {
      for (std::uint32_t i = 0; i < 8; ++i) {
        for (std::uint32_t j = 0; j < 8; ++j) {
          const std::uint32_t row = transposed ? j : i, column = transposed ? i : j;
          const std::uint32_t word = 4 * (4 * row + column / 2) + matrix;
          EXPECT_EQ(got[64 * matrix + 8 * i + j], 2 * word + column % 2);
        }
      }
    }
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
