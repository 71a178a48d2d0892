// SPDX-License-Identifier: Apache-2.0
// Products of small matrices by a warp: mma, and the loads and stores that go with it.
//
// The layouts are the manual's ("Matrix Fragments for mma"), which one rule gives for all shapes. A
// lane has a group, lane / 4, and a place in it, lane % 4; a register of 32 bits holds p elements.
// Register r of A holds row group + 8 (r % 2), columns 4p (r / 2) + p place + 0 ... p - 1; register
// r of B the same rows of column `group`; C and D have rows group + 8 (r / 2), columns 2 place + r
// % 2.
//
// Floats are multiplied and added up in double precision and rounded once, integers exactly: a
// device's sums may differ in the last digits.
#include <bit>
#include <cmath>

#include "elementwise.h"
#include "numbers.h"

namespace vgpu::ptx {
namespace {

struct Shape {
  std::uint32_t m, n, k;
};

// What an element of A, B, C or D is, and how many a register holds.
double element(Type type, std::uint64_t word, std::uint32_t number) {
  switch (type) {
    case Type::kF16: return Half{static_cast<std::uint16_t>(word >> (16 * number))}.get();
    case Type::kBF16: return Brain{static_cast<std::uint16_t>(word >> (16 * number))}.get();
    case Type::kTF32: return std::bit_cast<float>(static_cast<std::uint32_t>(word) & 0xFFFFE000U);
    case Type::kF32: return std::bit_cast<float>(static_cast<std::uint32_t>(word));
    case Type::kF64: return std::bit_cast<double>(word);
    case Type::kE4M3: return unpack((word >> (8 * number)) & 255U, kE4M3Format);
    case Type::kE5M2: return unpack((word >> (8 * number)) & 255U, kE5M2Format);
    case Type::kS8: return static_cast<std::int8_t>(word >> (8 * number));
    case Type::kU8: return static_cast<std::uint8_t>(word >> (8 * number));
    default: return static_cast<std::int32_t>(word);  // s32
  }
}
std::uint32_t elements_of(Type type) {
  if (type == Type::kS32 || size_of(type) >= 4) return 1;
  return 4 / size_of(type);
}

// What an instruction needs beside its rows, which its list has: D, A, B, C.
struct Product {
  Shape shape;
  Type d, a, b, c;
  bool saturates;
};
// In an instruction's immediate: a byte each.
std::int64_t as_immediate(const Product& product) {
  std::uint64_t bits = 0;
  int shift = 0;
  auto put = [&](auto value) {
    bits |= static_cast<std::uint64_t>(value) << shift;
    shift += 8;
  };
  put(product.shape.m), put(product.shape.n), put(product.shape.k);
  put(product.d), put(product.a), put(product.b), put(product.c), put(product.saturates);
  return static_cast<std::int64_t>(bits);
}
Product from_immediate(std::int64_t immediate) {
  auto byte = [&](int number) {
    return static_cast<std::uint32_t>(static_cast<std::uint64_t>(immediate) >> (8 * number)) & 255U;
  };
  auto type = [&](int number) { return static_cast<Type>(byte(number)); };
  return {{byte(0), byte(1), byte(2)}, type(3), type(4), type(5), type(6), byte(7) != 0};
}

class Fragments {
 public:
  Fragments(Warp& warp, const Instruction& instruction, Product product)
      : warp_(warp), rows_(instruction.list), product_(product) {}

  void run() {
    const Shape& shape = product_.shape;
    d_ = count(product_.d, shape.m * shape.n);
    a_ = count(product_.a, shape.m * shape.k);
    b_ = count(product_.b, shape.k * shape.n);
    read_a();
    read_b();
    const std::uint32_t per_register = elements_of(product_.d);
    for (std::uint32_t r = 0; r < d_; ++r) {
      for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
        std::uint64_t word = 0;
        for (std::uint32_t j = 0; j < per_register; ++j) {
          // Two of 16 bits are neighbours of a row; else registers are.
          const std::uint32_t row = lane / 4 + 8 * (per_register == 2 ? r : r / 2);
          const std::uint32_t column = 2 * (lane % 4) + (per_register == 2 ? j : r % 2);
          const double c = element(product_.c, read(d_ + a_ + b_ + r, lane), j);
          word |= packed(sum(row, column, c)) << (16 * j);
        }
        results_[r][lane] = word;
      }
    }
    write();
  }

 private:
  // Registers that hold so many elements, over all lanes.
  static std::uint32_t count(Type type, std::uint32_t elements) {
    return elements / kLanes / elements_of(type);
  }
  std::uint32_t width() const { return product_.a == Type::kF64 ? 8 : 4; }
  std::uint64_t read(std::uint32_t index, std::uint32_t lane) {
    return width() == 8 ? warp_.row<const std::uint64_t>(rows_[index])[lane]
                        : warp_.row<const std::uint32_t>(rows_[index])[lane];
  }
  void read_a() {
    const std::uint32_t p = elements_of(product_.a);
    const bool one_half = product_.shape.m == 8;  // of f64
    for (std::uint32_t r = 0; r < a_; ++r) {
      for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
        for (std::uint32_t j = 0; j < p; ++j) {
          const std::uint32_t row = lane / 4 + (one_half ? 0 : 8 * (r % 2));
          const std::uint32_t column = (one_half ? r : r / 2) * 4 * p + p * (lane % 4) + j;
          left_[row][column] = element(product_.a, read(d_ + r, lane), j);
        }
      }
    }
  }
  void read_b() {
    const std::uint32_t p = elements_of(product_.b);
    for (std::uint32_t r = 0; r < b_; ++r) {
      for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
        for (std::uint32_t j = 0; j < p; ++j) {
          right_[r * 4 * p + p * (lane % 4) + j][lane / 4] =
              element(product_.b, read(d_ + a_ + r, lane), j);
        }
      }
    }
  }
  double sum(std::uint32_t row, std::uint32_t column, double c) const {
    double total = 0;
    for (std::uint32_t k = 0; k < product_.shape.k; ++k) total += left_[row][k] * right_[k][column];
    return total + c;
  }
  std::uint64_t packed(double value) const {
    switch (product_.d) {
      case Type::kF64: return std::bit_cast<std::uint64_t>(value);
      case Type::kF32: return std::bit_cast<std::uint32_t>(static_cast<float>(value));
      case Type::kF16: return Half::from(value).bits;
      default: break;
    }
    constexpr double kLow = -2147483648.0, kHigh = 2147483647.0;
    if (product_.saturates) value = value < kLow ? kLow : value > kHigh ? kHigh : value;
    return static_cast<std::uint32_t>(static_cast<std::int64_t>(value));
  }
  void write() {
    for (std::uint32_t r = 0; r < d_; ++r) {
      for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
        if (width() == 8) {
          warp_.row<std::uint64_t>(rows_[r])[lane] = results_[r][lane];
        } else {
          warp_.row<std::uint32_t>(rows_[r])[lane] = static_cast<std::uint32_t>(results_[r][lane]);
        }
      }
    }
  }

  Warp& warp_;
  const std::vector<std::uint32_t>& rows_;
  const Product product_;
  std::uint32_t d_ = 0, a_ = 0, b_ = 0;
  double left_[16][32] = {}, right_[32][8] = {};
  std::uint64_t results_[4][kLanes] = {};
};

bool whole_warp(Warp& warp, const Instruction& instruction) {
  return warp.together(kAllLanes, instruction);
}

void multiply(Warp& warp, const Instruction& instruction, Lanes) {
  if (!whole_warp(warp, instruction)) return;
  Fragments(warp, instruction, from_immediate(instruction.immediate)).run();
}

struct Known {
  std::string_view shape;
  Shape size;
  std::uint32_t element_bytes;  // of A and B
};
constexpr Known kShapes[] = {
    {"m16n8k16", {16, 8, 16}, 2}, {"m16n8k8", {16, 8, 8}, 2}, {"m16n8k8", {16, 8, 8}, 4},
    {"m16n8k4", {16, 8, 4}, 4},   {"m8n8k4", {8, 8, 4}, 8},   {"m16n8k16", {16, 8, 16}, 1},
    {"m16n8k32", {16, 8, 32}, 1},
};

void mma(Decoder& decoder) {
  decoder.expect_operands(4, 4);
  decoder.ignore({"sync", "aligned"});
  if (!decoder.take("row") || !decoder.take("col")) decoder.fail("expected .row.col");
  Product product{};
  product.saturates = decoder.take("satfinite");
  const Known* known = nullptr;
  std::string_view shape;
  for (const Known& each : kShapes) {
    if (decoder.has(each.shape)) shape = each.shape;
  }
  decoder.take(shape);
  product.d = decoder.take_type();
  product.a = decoder.take_type();
  product.b = decoder.take_type();
  product.c = decoder.take_type();
  for (const Known& each : kShapes) {
    if (each.shape == shape && each.element_bytes == size_of(product.a)) known = &each;
  }
  if (known == nullptr || size_of(product.a) != size_of(product.b) ||
      size_of(product.c) != size_of(product.d)) {
    decoder.fail("no product of this shape and these types");
  }
  product.shape = known->size;
  const Type row = product.a == Type::kF64 ? Type::kB64 : Type::kB32;
  std::vector<std::uint32_t> list = decoder.destinations(0, row);
  for (std::size_t i = 1; i < 4; ++i) {
    for (std::uint32_t each : decoder.sources(i, row)) list.push_back(each);
  }
  const Shape& size = product.shape;
  const std::uint32_t wanted = 2 * size.m * size.n / kLanes / elements_of(product.d) +
                               size.m * size.k / kLanes / elements_of(product.a) +
                               size.k * size.n / kLanes / elements_of(product.b);
  if (list.size() != wanted) {
    decoder.fail("expected " + std::to_string(wanted) + " registers, got " +
                 std::to_string(list.size()));
  }
  Instruction& instruction = decoder.emit(multiply, {});
  instruction.list = std::move(list);
  instruction.immediate = as_immediate(product);
  instruction.control = true;
}

// -- 8 x 8 matrices of 16 bits in shared memory --------------------------------------------------
//
// Lane 8i + r has the address of row r of matrix i. A lane's register i holds two neighbours of row
// lane / 4 of it, or of a column with .trans.

std::uint64_t row_address(Warp& warp, const Instruction& instruction, std::uint32_t lane) {
  const auto offset = static_cast<std::uint64_t>(instruction.immediate);
  if (instruction.row[1] != kNone) {
    return warp.row<const std::uint32_t>(instruction.row[0])[lane] + offset;
  }
  return warp.row<const std::uint64_t>(instruction.row[0])[lane] + offset;
}

template <bool kStore>
void matrices(Warp& warp, const Instruction& instruction, Lanes) {
  if (!whole_warp(warp, instruction)) return;
  const bool transposed = (instruction.option & 1U) != 0;
  const auto space = static_cast<Space>(instruction.option >> 1);
  std::uint32_t words[4][kLanes] = {};
  for (std::uint32_t i = 0; i < instruction.list.size(); ++i) {
    std::byte* rows[8];
    for (std::uint32_t r = 0; r < 8; ++r) {
      const std::uint32_t lane = 8 * i + r;
      rows[r] = warp.resolve(space, row_address(warp, instruction, lane), 16, lane, instruction);
    }
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
      std::uint32_t& word = words[i][lane];
      if (kStore) word = warp.row<const std::uint32_t>(instruction.list[i])[lane];
      for (std::uint32_t j = 0; j < 2; ++j) {
        const std::uint32_t along = 2 * (lane % 4) + j, across = lane / 4;
        std::byte* at =
            rows[transposed ? along : across] + std::size_t{2} * (transposed ? across : along);
        auto* half = reinterpret_cast<std::byte*>(&word) + std::size_t{2} * j;
        std::memcpy(kStore ? at : half, kStore ? half : at, 2);
      }
    }
  }
  if (kStore) return;
  for (std::uint32_t i = 0; i < instruction.list.size(); ++i) {
    std::memcpy(warp.row<std::uint32_t>(instruction.list[i]), words[i], sizeof(words[i]));
  }
}

template <bool kStore>
void matrix_access(Decoder& decoder) {
  decoder.ignore({"sync", "aligned"});
  if (!decoder.take("m8n8") || !decoder.take("b16")) decoder.fail("expected .m8n8 and .b16");
  static constexpr std::size_t kCounts[] = {1, 2, 4, 0};
  const std::size_t matrices_count = kCounts[decoder.take_one({"x1", "x2", "x4"}, 3)];
  const bool transposed = decoder.take("trans");
  const Space space = decoder.take_space();
  const Address address = decoder.address(kStore ? 0 : 1, space);
  std::vector<std::uint32_t> rows =
      kStore ? decoder.sources(1, Type::kB32) : decoder.destinations(0, Type::kB32);
  if (rows.size() != matrices_count) {
    decoder.fail("expected " + std::to_string(matrices_count) + " registers");
  }
  Instruction& instruction = decoder.emit(matrices<kStore>, {address.row});
  if (address.narrow) instruction.row[1] = 0;
  instruction.list = std::move(rows);
  instruction.immediate = address.offset;
  instruction.option = static_cast<std::uint32_t>(address.space) << 1 | (transposed ? 1U : 0U);
  instruction.cache = decoder.new_cache();
  instruction.control = true;
}

void transpose(Warp& warp, const Instruction& instruction, Lanes) {
  if (!whole_warp(warp, instruction)) return;
  const auto* from = warp.row<const std::uint32_t>(instruction.row[1]);
  std::uint32_t words[kLanes] = {};
  for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
    for (std::uint32_t j = 0; j < 2; ++j) {
      const std::uint32_t row = 2 * (lane % 4) + j, column = lane / 4;
      const std::uint32_t half = from[row * 4 + column / 2] >> (16 * (column % 2)) & 0xFFFFU;
      words[lane] |= half << (16 * j);
    }
  }
  std::memcpy(warp.row<std::uint32_t>(instruction.row[0]), words, sizeof(words));
}
void movmatrix(Decoder& decoder) {
  decoder.ignore({"sync", "aligned", "m8n8", "trans"});
  decoder.take_type();
  decoder.emit(transpose, {decoder.destination(0, Type::kB32), decoder.source(1, Type::kB32)})
      .control = true;
}

constexpr Opcode kOpcodes[] = {
    {"mma", mma,
     ".sync.aligned.row.col: .m16n8k16, .m16n8k8 of f16 and bf16, .m16n8k8, .m16n8k4 of tf32, "
     ".m8n8k4 of f64, .m16n8k32, .m16n8k16 of s8, u8, e4m3, e5m2{.satfinite}"},
    {"ldmatrix", matrix_access<false>, ".sync.aligned.m8n8.{x1, x2, x4}{.trans}{.shared}.b16"},
    {"stmatrix", matrix_access<true>, ".sync.aligned.m8n8.{x1, x2, x4}{.trans}{.shared}.b16"},
    {"movmatrix", movmatrix, ".sync.aligned.m8n8.trans.b16"},
};

}  // namespace

std::span<const Opcode> matrix_opcodes() { return kOpcodes; }

}  // namespace vgpu::ptx
