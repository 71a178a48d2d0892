// SPDX-License-Identifier: Apache-2.0
// mov, cvta and what else moves values between registers.
#include "elementwise.h"
#include "program.h"

namespace vgpu::ptx {
namespace {

struct Copy {
  template <typename T>
  static T of(T value) {
    return value;
  }
};
struct Wide {
  std::uint64_t low, high;
};

template <typename T>
constexpr Instruction::Run kCopy = elementwise<Copy, T, T>;

Instruction::Run copy_of(std::uint32_t bytes) {
  switch (bytes) {
    case 1: return kCopy<std::uint8_t>;
    case 2: return kCopy<std::uint16_t>;
    case 4: return kCopy<std::uint32_t>;
    case 8: return kCopy<std::uint64_t>;
    default: return kCopy<Wide>;
  }
}

// Rows of a small type side by side in one of a large type, and back. The first is lowest.
void join(Warp& warp, const Instruction& instruction, Lanes lanes) {
  const std::uint32_t part = instruction.option;
  const auto parts = static_cast<std::uint32_t>(instruction.list.size());
  std::byte* to = warp.row<std::byte>(instruction.row[0]);
  for (std::uint32_t i = 0; i < parts; ++i) {
    const std::byte* from = warp.row<const std::byte>(instruction.list[i]);
    each_lane(lanes, [&](std::uint32_t lane) {
      std::memcpy(to + std::size_t{lane} * part * parts + std::size_t{i} * part,
                  from + std::size_t{lane} * part, part);
    });
  }
}
void split(Warp& warp, const Instruction& instruction, Lanes lanes) {
  const std::uint32_t part = instruction.option;
  const auto parts = static_cast<std::uint32_t>(instruction.list.size());
  const std::byte* from = warp.row<const std::byte>(instruction.row[0]);
  for (std::uint32_t i = 0; i < parts; ++i) {
    std::byte* to = warp.row<std::byte>(instruction.list[i]);
    each_lane(lanes, [&](std::uint32_t lane) {
      std::memcpy(to + std::size_t{lane} * part,
                  from + std::size_t{lane} * part * parts + std::size_t{i} * part, part);
    });
  }
}

void mov_vector(Decoder& decoder, Type type, bool joins) {
  const Operand& vector = decoder.operand(joins ? 1 : 0);
  const auto parts = static_cast<std::uint32_t>(vector.parts.size());
  if (parts == 0 || size_of(type) % parts != 0) decoder.fail("expected 2 or 4 parts");
  Type part = bits_of(size_of(type) / parts);
  if (joins) {
    std::vector<std::uint32_t> rows = decoder.sources(1, part);
    std::uint32_t to = decoder.destination(0, type);
    Instruction& instruction = decoder.emit(join, {to});
    instruction.list = std::move(rows);
    instruction.option = size_of(part);
  } else {
    std::uint32_t from = decoder.source(1, type);
    std::vector<std::uint32_t> rows = decoder.destinations(0, part);
    // A part that is a source as well must be read first: through a copy.
    std::uint32_t copied = decoder.temporary(type);
    decoder.emit(copy_of(size_of(type)), {copied, from});
    Instruction& instruction = decoder.emit(split, {copied});
    instruction.list = std::move(rows);
    instruction.option = size_of(part);
  }
}

void read_clock(Warp& warp, const Instruction& instruction, Lanes lanes) {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  const std::uint64_t nanoseconds = static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 +
                                    static_cast<std::uint64_t>(now.tv_nsec);
  if (instruction.option == 8) {
    auto* to = warp.row<std::uint64_t>(instruction.row[0]);
    each_lane(lanes, [&](std::uint32_t lane) { to[lane] = nanoseconds; });
  } else {
    auto* to = warp.row<std::uint32_t>(instruction.row[0]);
    std::uint64_t word = nanoseconds >> instruction.immediate;
    each_lane(lanes, [&](std::uint32_t lane) { to[lane] = static_cast<std::uint32_t>(word); });
  }
}

bool is_clock(const Operand& operand) {
  return operand.kind == Operand::Kind::kName &&
         (operand.name.starts_with("%clock") || operand.name.starts_with("%globaltimer"));
}

void mov(Decoder& decoder) {
  decoder.expect_operands(2, 2);
  decoder.ignore({"volatile"});
  Type type = decoder.take_type();
  if (decoder.operand(1).kind == Operand::Kind::kVector) return mov_vector(decoder, type, true);
  if (decoder.operand(0).kind == Operand::Kind::kVector) return mov_vector(decoder, type, false);
  if (is_clock(decoder.operand(1))) {
    Instruction& clock = decoder.emit(read_clock, {decoder.destination(0, type)});
    clock.option = size_of(type);
    clock.immediate = decoder.operand(1).name.ends_with("_hi") ? 32 : 0;
    return;
  }
  // A register of more bytes than the type's is no error for what only moves bits.
  decoder.emit(copy_of(size_of(type)), {decoder.destination(0, type), decoder.source(1, type)});
}

struct AddImmediate {
  template <typename T>
  static T of(const Instruction& instruction, T value) {
    return static_cast<T>(value + static_cast<T>(instruction.immediate));
  }
};
struct TakeWindow {
  template <typename T>
  static T of(T value) {
    return static_cast<T>(value & kWindowMask);
  }
};

std::uint64_t window_of(Decoder& decoder, Space space) {
  switch (space) {
    case Space::kShared:
    case Space::kSharedCluster: return kSharedWindow;
    case Space::kLocal: return kLocalWindow;
    case Space::kParam: return kParamWindow;
    case Space::kGlobal:
    case Space::kConst: return 0;
    default: decoder.fail("expected a memory: .shared, .global, ...");
  }
}

// To a generic address, or from one.
void cvta(Decoder& decoder) {
  bool to_space = decoder.take("to");
  std::uint64_t window = window_of(decoder, decoder.take_space());
  Type type = decoder.take_type();
  if (size_of(type) != 8) decoder.fail("only addresses of 64 bits");
  const Operand& from = decoder.operand(1);
  bool is_local_param = false;  // the address of a parameter that is a local variable
  if (const Place* place = decoder.builder().find_place(from.name)) {
    is_local_param = window == kParamWindow && place->space == Space::kLocal;
  }
  if (is_local_param) window = kLocalWindow;
  std::uint32_t to = decoder.destination(0, type), row = decoder.source(1, type);
  if (to_space) {
    decoder.emit(elementwise<TakeWindow, std::uint64_t, std::uint64_t>, {to, row});
    return;
  }
  Instruction& add =
      decoder.emit(elementwise_with<AddImmediate, std::uint64_t, std::uint64_t>, {to, row});
  add.immediate = static_cast<std::int64_t>(window);
}

struct InWindow {
  static std::uint8_t of(const Instruction& instruction, std::uint64_t address) {
    return address >> kWindowShift == static_cast<std::uint64_t>(instruction.immediate) ? 1 : 0;
  }
};

void isspacep(Decoder& decoder) {
  std::uint64_t window = window_of(decoder, decoder.take_space());
  Instruction& test =
      decoder.emit(elementwise_with<InWindow, std::uint8_t, std::uint64_t>,
                   {decoder.destination(0, Type::kPred), decoder.source(1, Type::kB64)});
  test.immediate = static_cast<std::int64_t>(window >> kWindowShift);
}

// The address of the same variable in another block's shared memory.
template <typename T>
struct MapTo {
  static T of(T address, std::uint32_t rank) {
    std::uint64_t inside = address & kWindowMask;
    std::uint64_t window = address & ~kWindowMask;
    return static_cast<T>(window | (inside % kSharedStride + rank * kSharedStride));
  }
};
void mapa(Decoder& decoder) {
  decoder.take_space();
  Type type = decoder.take_type();
  std::uint32_t to = decoder.destination(0, type), from = decoder.source(1, type),
                rank = decoder.source(2, Type::kU32);
  decoder.emit(size_of(type) == 8
                   ? elementwise<MapTo<std::uint64_t>, std::uint64_t, std::uint64_t, std::uint32_t>
                   : elementwise<MapTo<std::uint32_t>, std::uint32_t, std::uint32_t, std::uint32_t>,
               {to, from, rank});
}

struct RankOf {
  static std::uint32_t of(std::uint64_t address) {
    return static_cast<std::uint32_t>((address & kWindowMask) / kSharedStride);
  }
};
void getctarank(Decoder& decoder) {
  decoder.take_space();
  Type type = decoder.take_type();
  std::uint32_t from = decoder.source(1, type);
  if (size_of(type) == 4) {
    std::uint32_t wide = decoder.temporary(Type::kB64);
    decoder.emit(elementwise<Copy, std::uint64_t, std::uint32_t>, {wide, from});
    from = wide;
  }
  decoder.emit(elementwise<RankOf, std::uint32_t, std::uint64_t>,
               {decoder.destination(0, Type::kU32), from});
}

constexpr Opcode kOpcodes[] = {
    {"mov", mov,
     "{pred, b16-b128, u, s, f32, f64}; {a, b} to one and back; variables, functions, "
     "special registers"},
    {"cvta", cvta, "{.to}.{global, shared, local, const, param}.u64"},
    {"isspacep", isspacep, ".{global, shared, local, const, param}"},
    {"mapa", mapa, "{.shared::cluster}.{u32, u64}"},
    {"getctarank", getctarank, "{.shared::cluster}.{u32, u64}"},
};

}  // namespace

std::span<const Opcode> move_opcodes() { return kOpcodes; }

}  // namespace vgpu::ptx
