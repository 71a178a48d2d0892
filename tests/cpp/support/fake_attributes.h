// SPDX-License-Identifier: Apache-2.0
// Attributes of calls, as XLA describes them and as the runtime reads them, written as short as
// they can be: `levels("3:10;4:11")`, `tap("loss", {"['w']"}, {{"where", true}})`.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "core/attributes.h"
#include "core/call.h"
#include "core/lanes.h"
#include "xla/ffi.h"

namespace callgate::fake {

// An attribute's value, and the structs that XLA describes it with.
class Attribute {
 public:
  using Entries = std::map<std::string, Attribute>;
  using Integers = std::vector<std::int64_t>;

  Attribute(std::string text) : type_(XLA_FFI_AttrType_STRING), text_(std::move(text)) {}  // NOLINT
  Attribute(const char* text) : Attribute(std::string(text)) {}                            // NOLINT
  Attribute(Entries entries)                                                               // NOLINT
      : type_(XLA_FFI_AttrType_DICTIONARY), entries_(std::move(entries)) {}
  Attribute(std::same_as<bool> auto flag)  // NOLINT
      : Attribute(number(XLA_FFI_DataType_PRED, std::uint8_t{flag})) {}
  Attribute(int value) : Attribute(number<std::int64_t>(XLA_FFI_DataType_S64, value)) {}   // NOLINT
  Attribute(const Integers& values) : Attribute(numbers(XLA_FFI_DataType_S64, values)) {}  // NOLINT

  template <typename T>
  static Attribute number(XLA_FFI_DataType dtype, T value) {
    return Attribute(XLA_FFI_AttrType_SCALAR, dtype, std::vector<T>{value});
  }
  template <typename T>
  static Attribute numbers(XLA_FFI_DataType dtype, const std::vector<T>& values) {
    return Attribute(XLA_FFI_AttrType_ARRAY, dtype, values);
  }
  static Attribute bytes(const std::vector<std::uint8_t>& values) {
    return numbers(XLA_FFI_DataType_U8, values);
  }
  // A list, as attributes have it.
  static Attribute listed(const std::vector<Attribute>& items) {
    Entries entries;
    for (const Attribute& item : items) entries.emplace(std::to_string(entries.size()), item);
    return entries;
  }

  XLA_FFI_AttrType type() const { return type_; }

  // Valid while this lives and does not move.
  void* describe() {
    switch (type_) {
      case XLA_FFI_AttrType_STRING: span_ = {text_.data(), text_.size()}; return &span_;
      case XLA_FFI_AttrType_SCALAR: scalar_ = {dtype_, text_.data()}; return &scalar_;
      case XLA_FFI_AttrType_ARRAY: array_ = {dtype_, count_, text_.data()}; return &array_;
      default: attrs_ = describe_entries(); return &attrs_;
    }
  }

  // A dictionary's entries, as a frame holds them.
  XLA_FFI_Attrs describe_entries() {
    types_.clear();
    values_.clear();
    names_.clear();
    spans_.clear();
    for (auto& [name, value] : entries_) {  // sorted by name, as XLA promises
      types_.push_back(value.type());
      values_.push_back(value.describe());
      names_.push_back(&spans_.emplace_back(XLA_FFI_ByteSpan{name.data(), name.size()}));
    }
    return {XLA_FFI_Attrs_STRUCT_SIZE,
            nullptr,
            static_cast<std::int64_t>(values_.size()),
            types_.data(),
            names_.data(),
            values_.data()};
  }

 private:
  template <typename T>
  Attribute(XLA_FFI_AttrType type, XLA_FFI_DataType dtype, const std::vector<T>& values)
      : type_(type), dtype_(dtype), count_(values.size()) {
    text_.assign(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  }

  XLA_FFI_AttrType type_;
  XLA_FFI_DataType dtype_ = XLA_FFI_DataType_INVALID;
  std::size_t count_ = 0;
  std::string text_;  // or the bytes of numbers
  Entries entries_;

  XLA_FFI_ByteSpan span_{};
  XLA_FFI_Scalar scalar_{};
  XLA_FFI_Array array_{};
  XLA_FFI_Attrs attrs_{};
  std::vector<XLA_FFI_AttrType> types_;
  std::vector<void*> values_;
  std::vector<XLA_FFI_ByteSpan*> names_;
  std::list<XLA_FFI_ByteSpan> spans_;
};

using AttributeMap = Attribute::Entries;

// As a call site gets them.
inline Attributes decoded(AttributeMap entries) {
  return xla_ffi::decode_attributes(Attribute(std::move(entries)).describe_entries());
}

// `entries`, and `more`.
inline AttributeMap with(AttributeMap entries, AttributeMap more) {
  entries.merge(more);
  return entries;
}

// Batch levels, each as its extent and a digit for each operand: "3:10;4:11". One that begins with
// "#" is numbered.
inline AttributeMap levels(const std::string& text) {
  Attribute::Integers sizes, masks, numbered;
  std::istringstream all(text);
  for (std::string level; std::getline(all, level, ';');) {
    numbered.push_back(level.starts_with('#') ? 1 : 0);
    if (level.starts_with('#')) level.erase(0, 1);
    sizes.push_back(std::stoll(level));
    for (char digit : level.substr(level.find(':') + 1)) masks.push_back(digit - '0');
  }
  if (text.find('#') == std::string::npos) return {{"sizes", sizes}, {"masks", masks}};
  return {{"sizes", sizes}, {"masks", masks}, {"numbered", numbered}};
}

inline Lanes lanes(const std::string& text) { return Lanes::of(decoded(levels(text))); }

// A tap of a value with these leaves; `more`: the rest of what it holds.
inline AttributeMap tap(const std::string& name, const std::vector<Attribute>& paths,
                        AttributeMap more = {}) {
  more.insert({{"name", name}, {"paths", Attribute::listed(paths)}});
  more.try_emplace("role", "primal");
  return {{"spec", "{}"}, {"tap", more}};
}

// The spec of a call site that holds these entries.
inline SiteSpec site_spec(AttributeMap entries) {
  SiteSpec spec;
  spec.held = decoded(std::move(entries));
  spec.spec = spec.held.text("spec");
  spec.lanes = Lanes::of(spec.held.dictionary("batch"));
  return spec;
}

}  // namespace callgate::fake
