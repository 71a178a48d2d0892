// SPDX-License-Identifier: Apache-2.0
// Arithmetic of f16 and bf16, and of pairs of them in 32 bits.
//
// Done in float, or for fma in double, and rounded once: see numbers.h.
#include <bit>
#include <cmath>
#include <limits>

#include "elementwise.h"
#include "numbers.h"

namespace vgpu::ptx {
namespace {

enum Option : std::uint32_t { kSaturate = 1, kRelu = 2, kNan = 4, kXorSign = 8, kFlush = 16 };

template <typename T>
T canonical(T value) {
  return std::isnan(value.get()) ? T{0x7FFF} : value;
}
// .ftz: what has no exponent is zero.
template <typename T>
T flushed(const Instruction& instruction, T value) {
  constexpr std::uint32_t kExponent = std::is_same_v<T, Half> ? 0x7C00U : 0x7F80U;
  if ((instruction.option & kFlush) != 0 && (value.bits & kExponent) == 0) value.bits &= 0x8000U;
  return value;
}
template <typename T, typename V>
T finished(const Instruction& instruction, V value) {
  if ((instruction.option & kSaturate) != 0) {
    value = value > 0 ? (value > 1 ? V{1} : value) : V{0};
  }
  if ((instruction.option & kRelu) != 0 && value < 0) value = 0;
  return flushed(instruction, canonical(T::from(value)));
}

struct Add {
  template <typename T>
  static T of(const Instruction& instruction, T a, T b) {
    return finished<T>(instruction, flushed(instruction, a).get() + flushed(instruction, b).get());
  }
};
struct Subtract {
  template <typename T>
  static T of(const Instruction& instruction, T a, T b) {
    return finished<T>(instruction, flushed(instruction, a).get() - flushed(instruction, b).get());
  }
};
struct Multiply {
  template <typename T>
  static T of(const Instruction& instruction, T a, T b) {
    return finished<T>(instruction, flushed(instruction, a).get() * flushed(instruction, b).get());
  }
};
struct Fma {
  template <typename T>
  static T of(const Instruction& instruction, T a, T b, T c) {
    // The product is exact in double, and the sum rounds; where it does, a last digit that is
    // odd keeps the second rounding from going wrong.
    const double product =
        double{flushed(instruction, a).get()} * double{flushed(instruction, b).get()};
    const double addend = flushed(instruction, c).get();
    double sum = product + addend;
    const double rest = (product - (sum - addend)) + (addend - (sum - (sum - addend)));
    auto bits = std::bit_cast<std::uint64_t>(sum);
    if (rest != 0 && std::isfinite(sum) && (bits & 1U) == 0) {
      bits += (rest > 0) == (sum > 0) ? 1U : ~std::uint64_t{0};
      sum = std::bit_cast<double>(bits);
    }
    return finished<T>(instruction, sum);
  }
};
struct Exp2 {
  template <typename T>
  static T of(const Instruction& instruction, T a) {
    return finished<T>(instruction, std::exp2(double{flushed(instruction, a).get()}));
  }
};
struct Tanh {
  template <typename T>
  static T of(const Instruction& instruction, T a) {
    return finished<T>(instruction, std::tanh(double{a.get()}));
  }
};
struct Absolute {
  template <typename T>
  static T of(const Instruction&, T a) {
    return {static_cast<std::uint16_t>(a.bits & 0x7FFFU)};
  }
};
struct Negate {
  template <typename T>
  static T of(const Instruction&, T a) {
    return {static_cast<std::uint16_t>(a.bits ^ 0x8000U)};
  }
};
template <bool kMaximum>
struct Extreme {
  template <typename T>
  static T of(const Instruction& instruction, T a, T b) {
    a = flushed(instruction, a);
    b = flushed(instruction, b);
    const auto sign = static_cast<std::uint16_t>((a.bits ^ b.bits) & 0x8000U);
    const bool xor_sign = (instruction.option & kXorSign) != 0;
    if (xor_sign) {
      a.bits &= 0x7FFFU;
      b.bits &= 0x7FFFU;
    }
    const float x = a.get(), y = b.get();
    T result = a;
    if (std::isnan(x) || std::isnan(y)) {
      bool nan = (instruction.option & kNan) != 0 || (std::isnan(x) && std::isnan(y));
      if (nan) return {0x7FFF};
      result = std::isnan(x) ? b : a;
    } else {
      const bool a_first = x == y ? std::signbit(x) && !std::signbit(y) : x < y;
      result = a_first == kMaximum ? b : a;
    }
    if (xor_sign) result.bits = static_cast<std::uint16_t>((result.bits & 0x7FFFU) | sign);
    return result;
  }
};

// Both halves of 32 bits for themselves.
template <typename Operation, typename T>
struct Both {
  template <typename... From>
  static Pair<T> of(const Instruction& instruction, From... from) {
    return {Operation::of(instruction, from.low...), Operation::of(instruction, from.high...)};
  }
};

template <typename Operation, std::size_t kOperands>
Instruction::Run run_of(Type type) {
  auto pick = []<typename T, std::size_t... N>(std::type_identity<T>, std::index_sequence<N...>,
                                               bool pair) -> Instruction::Run {
    if (!pair) return elementwise_with<Operation, T, std::conditional_t<N == N, T, T>...>;
    using P = Pair<T>;
    return elementwise_with<Both<Operation, T>, P, std::conditional_t<N == N, P, P>...>;
  };
  const bool pair = size_of(type) == 4;
  constexpr std::make_index_sequence<kOperands> kNumbers{};
  if (type == Type::kF16 || type == Type::kF16x2) {
    return pick(std::type_identity<Half>{}, kNumbers, pair);
  }
  return pick(std::type_identity<Brain>{}, kNumbers, pair);
}

template <typename Operation, std::size_t kOperands>
void half(Decoder& decoder) {
  decoder.expect_operands(kOperands + 1, kOperands + 1);
  decoder.ignore({"rn", "approx"});
  std::uint32_t option = 0;
  if (decoder.take("ftz")) option |= kFlush;
  if (decoder.take("sat")) option |= kSaturate;
  if (decoder.take("relu")) option |= kRelu;
  if (decoder.take("NaN")) option |= kNan;
  if (decoder.take("xorsign")) {
    if (!decoder.take("abs")) decoder.fail("expected .xorsign.abs");
    option |= kXorSign;
  }
  Type type = decoder.take_type();
  std::uint32_t rows[4] = {kNone, kNone, kNone, kNone};
  for (std::size_t i = 1; i <= kOperands; ++i) rows[i] = decoder.source(i, type);
  rows[0] = decoder.destination(0, type);
  decoder.emit(run_of<Operation, kOperands>(type), {rows[0], rows[1], rows[2], rows[3]}).option =
      option;
}

constexpr std::string_view kTypes = "{.rn}{.ftz}{.sat}.{f16, f16x2, bf16, bf16x2}";
constexpr std::string_view kExtremes = "{.ftz}{.NaN}{.xorsign.abs}.{f16, f16x2, bf16, bf16x2}";

constexpr Opcode kOpcodes[] = {
    {"add", half<Add, 2>, kTypes, fits_halves},
    {"sub", half<Subtract, 2>, kTypes, fits_halves},
    {"mul", half<Multiply, 2>, kTypes, fits_halves},
    {"fma", half<Fma, 3>, "{.rn}{.ftz}{.sat, .relu}.{f16, f16x2, bf16, bf16x2}", fits_halves},
    {"abs", half<Absolute, 1>, ".{f16, f16x2, bf16, bf16x2}", fits_halves},
    {"neg", half<Negate, 1>, ".{f16, f16x2, bf16, bf16x2}", fits_halves},
    {"min", half<Extreme<false>, 2>, kExtremes, fits_halves},
    {"max", half<Extreme<true>, 2>, kExtremes, fits_halves},
    {"ex2", half<Exp2, 1>, ".approx{.ftz}.{f16, f16x2, bf16, bf16x2}", fits_halves},
    {"tanh", half<Tanh, 1>, ".approx.{f16, f16x2, bf16, bf16x2}", fits_halves},
};

}  // namespace

std::span<const Opcode> half_opcodes() { return kOpcodes; }

}  // namespace vgpu::ptx
