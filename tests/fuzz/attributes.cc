// The attributes of a call, in XLA's structs. The bytes say which there are: for each a kind, the
// length of its name, the name, and then what the kind asks for; a dictionary ends with a zero. The
// kinds are XLA's, and one more that it may have some day.
#include "xla/attributes.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "targets.h"

namespace callgate::fuzz {
namespace {

constexpr int kDepth = 6;
constexpr int kKinds = 5;
static_assert(XLA_FFI_AttrType_ARRAY == 1 && XLA_FFI_AttrType_STRING == kKinds - 1);

// Owns a dictionary as XLA would, each value in memory of exactly its size.
class Built {
 public:
  const XLA_FFI_Attrs* dictionary(Bytes& in, int depth) {
    auto types = std::make_unique<std::vector<XLA_FFI_AttrType>>();
    auto names = std::make_unique<std::vector<XLA_FFI_ByteSpan*>>();
    auto values = std::make_unique<std::vector<void*>>();
    for (std::uint8_t kind = in.number(); kind != 0; kind = in.number()) {
      names->push_back(text(in));
      const int type = 1 + (kind - 1) % kKinds;
      types->push_back(static_cast<XLA_FFI_AttrType>(type));
      values->push_back(value(type, in, depth));
    }
    attrs_.push_back({});
    XLA_FFI_Attrs& made = attrs_.back();
    made.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
    made.size = static_cast<std::int64_t>(names->size());
    made.types = types->data();
    made.names = names->data();
    made.attrs = values->data();
    types_.push_back(std::move(types));
    names_.push_back(std::move(names));
    values_.push_back(std::move(values));
    return &made;
  }

 private:
  void* value(int kind, Bytes& in, int depth) {
    if (kind == XLA_FFI_AttrType_SCALAR) return scalar(in);
    if (kind == XLA_FFI_AttrType_ARRAY) return array(in);
    if (kind == XLA_FFI_AttrType_STRING) return text(in);
    Bytes none("");
    Bytes& from = depth == 0 ? none : in;
    return const_cast<XLA_FFI_Attrs*>(dictionary(from, depth - 1));
  }

  void* copy(std::string_view bytes, std::size_t size) {
    memory_.push_back(std::make_unique<char[]>(size));
    std::memcpy(memory_.back().get(), bytes.data(), bytes.size());
    return memory_.back().get();
  }

  XLA_FFI_ByteSpan* text(Bytes& in) {
    const std::string_view bytes = in.take(in.number());
    spans_.push_back({static_cast<const char*>(copy(bytes, bytes.size())), bytes.size()});
    return &spans_.back();
  }

  // Codes that no XLA of today has, too.
  static std::size_t element_bytes(std::uint8_t code) {
    const auto dtype = dtype_from_code(code);
    return dtype ? storage_bytes(*dtype, 1) : 0;
  }

  XLA_FFI_Scalar* scalar(Bytes& in) {
    const std::uint8_t code = in.number() % 32;
    const std::size_t size = element_bytes(code);
    scalars_.push_back({static_cast<XLA_FFI_DataType>(code), copy(in.take(size), size)});
    return &scalars_.back();
  }

  XLA_FFI_Array* array(Bytes& in) {
    const std::uint8_t code = in.number() % 32, count = in.number();
    const auto dtype = dtype_from_code(code);
    const std::size_t size = dtype ? storage_bytes(*dtype, count) : 0;
    arrays_.push_back({static_cast<XLA_FFI_DataType>(code), count, copy(in.take(size), size)});
    return &arrays_.back();
  }

  std::deque<XLA_FFI_Attrs> attrs_;
  std::deque<XLA_FFI_ByteSpan> spans_;
  std::deque<XLA_FFI_Scalar> scalars_;
  std::deque<XLA_FFI_Array> arrays_;
  std::vector<std::unique_ptr<char[]>> memory_;
  std::vector<std::unique_ptr<std::vector<XLA_FFI_AttrType>>> types_;
  std::vector<std::unique_ptr<std::vector<XLA_FFI_ByteSpan*>>> names_;
  std::vector<std::unique_ptr<std::vector<void*>>> values_;
};

void look_at(const callgate_attribute& attribute) {
  require(std::strlen(attribute.name) < 256, "a name ends in a zero");
  const auto dtype = dtype_from_code(attribute.dtype);
  switch (attribute.kind) {
    case CALLGATE_STRING: return touch(attribute.data, attribute.count);
    case CALLGATE_DICTIONARY:
      for (std::size_t i = 0; i < attribute.count; ++i)
        look_at(static_cast<const callgate_attribute*>(attribute.data)[i]);
      return;
    default:
      if (!dtype) return require(false, "numbers have a type");
      require(attribute.kind != CALLGATE_NUMBER || attribute.count == 1, "a number is one");
      touch(attribute.data, storage_bytes(*dtype, attribute.count));
  }
}

}  // namespace

void attributes(std::string_view bytes) {
  Bytes in(bytes);
  Built built;
  const XLA_FFI_Attrs& all = *built.dictionary(in, kDepth);
  // XLA's header says in its errors of what kind an attribute is, of those that it knows.
  const bool known = std::none_of(all.types, all.types + all.size,
                                  [](auto type) { return static_cast<int>(type) == kKinds; });
  for (std::int64_t i = 0; i < all.size; ++i) {
    const std::string_view name(all.names[i]->ptr, all.names[i]->len);
    try {
      const Attributes made = xla_ffi::decode_attributes(all, name);
      if (const callgate_attribute* found = made.find("a")) look_at(*found);
      Attributes holder;
      holder.add_dictionary("all", xla_ffi::decode_attributes(all, name));
      look_at(*holder.find("all"));
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the promised one
    }
    if (!known) continue;
    try {
      const std::string text = xla_ffi::text_attribute(::xla::ffi::Dictionary(&all), name);
      touch(text.data(), text.size());
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the promised one
    }
  }
}

}  // namespace callgate::fuzz
