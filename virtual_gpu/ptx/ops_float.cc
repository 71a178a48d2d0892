// SPDX-License-Identifier: Apache-2.0
// Arithmetic of f32 and f64.
//
// Approximate functions (ex2.approx and its like) are as exact as the host's: a device's are within
// its manual's bounds of that. NaN results are the device's one NaN.
#include <bit>
#include <cmath>
#include <limits>

#include "elementwise.h"
#include "numbers.h"

namespace vgpu::ptx {
namespace {

enum Option : std::uint32_t {
  kRounding = 7,
  kFlush = 8,
  kSaturate = 16,
  kNan = 32,      // min, max: NaN where one is
  kXorSign = 64,  // min, max: of the magnitudes, with the signs' product
};

template <typename T>
T in(const Instruction& instruction, T value) {
  if constexpr (sizeof(T) == 4) {
    if ((instruction.option & kFlush) != 0) return flushed(value);
  }
  return value;
}
float canonical(float value) {
  return std::isnan(value) ? std::bit_cast<float>(0x7FFFFFFFU) : value;
}
double canonical(double value) {
  return std::isnan(value) ? std::bit_cast<double>(0x7FF8000000000000ULL) : value;
}
template <typename T>
T out(const Instruction& instruction, T value) {
  value = in(instruction, value);
  if ((instruction.option & kSaturate) != 0) {
    if (!(value > 0)) return 0;
    return value > 1 ? T{1} : value;
  }
  return canonical(value);
}

struct Add {
  template <typename T>
  static T of(T a, T b) {
    return a + b;
  }
};
struct Subtract {
  template <typename T>
  static T of(T a, T b) {
    return a - b;
  }
};
struct Multiply {
  template <typename T>
  static T of(T a, T b) {
    return a * b;
  }
};
struct Divide {
  template <typename T>
  static T of(T a, T b) {
    return a / b;
  }
};
struct Fma {
  template <typename T>
  static T of(T a, T b, T c) {
    return std::fma(a, b, c);
  }
};
struct Reciprocal {
  template <typename T>
  static T of(T a) {
    return T{1} / a;
  }
};
struct SquareRoot {
  template <typename T>
  static T of(T a) {
    return std::sqrt(a);
  }
};
struct ReciprocalSquareRoot {
  static float of(float a) { return static_cast<float>(1.0 / std::sqrt(double{a})); }
  static double of(double a) { return 1.0 / std::sqrt(a); }
};
struct Exp2 {
  static float of(float a) { return std::exp2(a); }
};
struct Log2 {
  static float of(float a) { return std::log2(a); }
};
struct Sine {
  static float of(float a) { return std::sin(a); }
};
struct Cosine {
  static float of(float a) { return std::cos(a); }
};
struct Tanh {
  static float of(float a) { return std::tanh(a); }
};

// The plain case, which compilers turn into vectors: no rounding mode, no flush.
template <typename Operation, typename T, typename... From>
struct Plain {
  static T of(From... from) { return canonical(Operation::of(from...)); }
};
template <typename Operation, typename T, typename... From>
struct WithOptions {
  static T of(const Instruction& instruction, From... from) {
    return out(instruction, Operation::of(in(instruction, from)...));
  }
};
// In the host's rounding mode, for all lanes of the instruction.
template <typename Operation, typename T, typename... From>
void rounded(Warp& warp, const Instruction& instruction, Lanes lanes) {
  RoundingScope scope(static_cast<Rounding>(instruction.option & kRounding));
  elementwise_with<WithOptions<Operation, T, From...>, T, From...>(warp, instruction, lanes);
}

template <typename Operation, typename T, typename... From>
Instruction::Run run_of(std::uint32_t option) {
  if (option == 0) return elementwise<Plain<Operation, T, From...>, T, From...>;
  if ((option & kRounding) != 0) return rounded<Operation, T, From...>;
  return elementwise_with<WithOptions<Operation, T, From...>, T, From...>;
}

std::uint32_t take_options(Decoder& decoder) {
  auto option = static_cast<std::uint32_t>(decoder.take_one({"rn", "rz", "rm", "rp"}, 0));
  decoder.ignore({"approx", "full"});
  if (decoder.take("ftz")) option |= kFlush;
  if (decoder.take("sat")) option |= kSaturate;
  return option;
}

// Its operands, all of one type.
void emit_of(Decoder& decoder, Type type, std::size_t operands, Instruction::Run run,
             std::uint32_t option) {
  decoder.expect_operands(operands + 1, operands + 1);
  std::uint32_t rows[4] = {kNone, kNone, kNone, kNone};
  for (std::size_t i = 1; i <= operands; ++i) rows[i] = decoder.source(i, type);
  rows[0] = decoder.destination(0, type);
  decoder.emit(run, {rows[0], rows[1], rows[2], rows[3]}).option = option;
}

template <typename Operation>
void binary(Decoder& decoder) {
  std::uint32_t option = take_options(decoder);
  Type type = decoder.take_type();
  auto run = type == Type::kF32 ? run_of<Operation, float, float, float>(option)
                                : run_of<Operation, double, double, double>(option);
  emit_of(decoder, type, 2, run, option);
}
void fma(Decoder& decoder) {
  std::uint32_t option = take_options(decoder);
  Type type = decoder.take_type();
  auto run = type == Type::kF32 ? run_of<Fma, float, float, float, float>(option)
                                : run_of<Fma, double, double, double, double>(option);
  emit_of(decoder, type, 3, run, option);
}
template <typename Operation>
void unary(Decoder& decoder) {
  std::uint32_t option = take_options(decoder);
  Type type = decoder.take_type();
  auto run = type == Type::kF32 ? run_of<Operation, float, float>(option)
                                : run_of<Operation, double, double>(option);
  emit_of(decoder, type, 1, run, option);
}
template <typename Operation>
void single(Decoder& decoder) {  // functions that only f32 has
  std::uint32_t option = take_options(decoder);
  if (decoder.take_type() != Type::kF32) decoder.fail("only for .f32");
  emit_of(decoder, Type::kF32, 1, run_of<Operation, float, float>(option), option);
}

// Signs are bits: NaN keeps its own.
template <bool kAbsolute>
struct Sign {
  static float of(const Instruction& instruction, float a) {
    auto bits = std::bit_cast<std::uint32_t>(in(instruction, a));
    return std::bit_cast<float>(kAbsolute ? bits & 0x7FFFFFFFU : bits ^ 0x80000000U);
  }
  static double of(const Instruction&, double a) {
    auto bits = std::bit_cast<std::uint64_t>(a);
    constexpr std::uint64_t kSign = std::uint64_t{1} << 63;
    return std::bit_cast<double>(kAbsolute ? bits & ~kSign : bits ^ kSign);
  }
};
template <bool kAbsolute>
void sign(Decoder& decoder) {
  std::uint32_t option = take_options(decoder);
  Type type = decoder.take_type();
  auto run = type == Type::kF32 ? elementwise_with<Sign<kAbsolute>, float, float>
                                : elementwise_with<Sign<kAbsolute>, double, double>;
  emit_of(decoder, type, 1, run, option);
}

// -0 is less than +0. One NaN is passed over, unless .NaN says otherwise.
template <bool kMaximum, typename T>
struct Extreme {
  static T of(const Instruction& instruction, T a, T b) {
    a = in(instruction, a);
    b = in(instruction, b);
    const bool negative = std::signbit(a) != std::signbit(b);
    if ((instruction.option & kXorSign) != 0) {
      a = std::fabs(a);
      b = std::fabs(b);
    }
    if (std::isnan(a) || std::isnan(b)) {
      if ((instruction.option & kNan) != 0 || (std::isnan(a) && std::isnan(b))) {
        return canonical(std::numeric_limits<T>::quiet_NaN());
      }
      return with_sign(instruction, std::isnan(a) ? b : a, negative);
    }
    const bool a_first = a == b ? std::signbit(a) && !std::signbit(b) : a < b;
    return with_sign(instruction, a_first == kMaximum ? b : a, negative);
  }
  static T with_sign(const Instruction& instruction, T value, bool negative) {
    if ((instruction.option & kXorSign) == 0) return value;
    return std::copysign(value, negative ? T{-1} : T{1});
  }
};
template <bool kMaximum, typename T>
struct ExtremeOfThree {
  static T of(const Instruction& instruction, T a, T b, T c) {
    using Two = Extreme<kMaximum, T>;
    return Two::of(instruction, Two::of(instruction, a, b), c);
  }
};
template <bool kMaximum>
void extreme(Decoder& decoder) {
  std::uint32_t option = 0;
  if (decoder.take("ftz")) option |= kFlush;
  if (decoder.take("NaN")) option |= kNan;
  if (decoder.take("xorsign")) {
    if (!decoder.take("abs")) decoder.fail("expected .xorsign.abs");
    option |= kXorSign;
  }
  Type type = decoder.take_type();
  if (decoder.operands() == 4) {
    if (type != Type::kF32) decoder.fail("three values only for .f32");
    return emit_of(decoder, type, 3,
                   elementwise_with<ExtremeOfThree<kMaximum, float>, float, float, float, float>,
                   option);
  }
  auto run = type == Type::kF32
                 ? elementwise_with<Extreme<kMaximum, float>, float, float, float>
                 : elementwise_with<Extreme<kMaximum, double>, double, double, double>;
  emit_of(decoder, type, 2, run, option);
}

constexpr std::string_view kRounded = "{.rn, .rz, .rm, .rp}{.ftz}{.sat}.{f32, f64}";
constexpr std::string_view kApproximate = "{.approx}{.ftz}.f32";

constexpr Opcode kOpcodes[] = {
    {"add", binary<Add>, kRounded, fits_floats},
    {"sub", binary<Subtract>, kRounded, fits_floats},
    {"mul", binary<Multiply>, kRounded, fits_floats},
    {"div", binary<Divide>, "{.approx, .full, .rn, .rz, .rm, .rp}{.ftz}.{f32, f64}", fits_floats},
    {"fma", fma, kRounded, fits_floats},
    {"mad", fma, kRounded, fits_floats},
    {"rcp", unary<Reciprocal>, "{.approx, .rn, .rz, .rm, .rp}{.ftz}.{f32, f64}", fits_floats},
    {"sqrt", unary<SquareRoot>, "{.approx, .rn, .rz, .rm, .rp}{.ftz}.{f32, f64}", fits_floats},
    {"rsqrt", unary<ReciprocalSquareRoot>, ".approx{.ftz}.{f32, f64}", fits_floats},
    {"abs", sign<true>, "{.ftz}.{f32, f64}", fits_floats},
    {"neg", sign<false>, "{.ftz}.{f32, f64}", fits_floats},
    {"min", extreme<false>, "{.ftz}{.NaN}{.xorsign.abs}.{f32, f64}; three of .f32", fits_floats},
    {"max", extreme<true>, "{.ftz}{.NaN}{.xorsign.abs}.{f32, f64}; three of .f32", fits_floats},
    {"ex2", single<Exp2>, kApproximate, fits_floats},
    {"lg2", single<Log2>, kApproximate, fits_floats},
    {"sin", single<Sine>, kApproximate, fits_floats},
    {"cos", single<Cosine>, kApproximate, fits_floats},
    {"tanh", single<Tanh>, kApproximate, fits_floats},
};

}  // namespace

std::span<const Opcode> float_opcodes() { return kOpcodes; }

}  // namespace vgpu::ptx
