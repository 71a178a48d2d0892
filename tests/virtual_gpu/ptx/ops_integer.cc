#include "elementwise.h"

namespace vgpu::ptx {
namespace {

struct Add {
  template <typename T>
  static T of(T a, T b) {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
  }
};

void add(Decoder& decoder) {
  Type type = decoder.take_type();
  with_integer(decoder, type, [&]<typename T>(std::type_identity<T>) {
    decoder.emit(elementwise<Add, T, T, T>, {decoder.destination(0, type), decoder.source(1, type),
                                             decoder.source(2, type)});
  });
}

constexpr Opcode kOpcodes[] = {{"add", add, "{u16-u64, s16-s64}"}};

}  // namespace

std::span<const Opcode> integer_opcodes() { return kOpcodes; }

}  // namespace vgpu::ptx
