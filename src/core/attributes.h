// Values that are fixed when a program is traced: numbers, strings, arrays of numbers, and
// dictionaries of these, in the form that kernels see (include/callgate/kernel_abi.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "callgate/kernel_abi.h"
#include "core/dtype.h"

namespace callgate {

// Owns named values, sorted by name once sealed. Moving keeps what `view` points to.
class Attributes {
 public:
  Attributes() = default;
  Attributes(Attributes&&) = default;
  Attributes& operator=(Attributes&&) = default;

  void add_number(std::string_view name, DType dtype, const void* element);
  void add_numbers(std::string_view name, DType dtype, const void* elements, std::size_t count);
  void add_string(std::string_view name, std::string_view text);
  void add_dictionary(std::string_view name, Attributes entries);

  // Null where there is no such value. Valid until the next value is added.
  const callgate_attribute* find(std::string_view name) const noexcept;

  std::size_t size() const noexcept { return values_.size(); }

  // A value of the kind that it has to be; Error for one of another kind. Where there is none: "",
  // `missing`, no numbers, no entries.
  std::string_view text(std::string_view name) const;
  bool flag(std::string_view name) const;
  std::int64_t integer(std::string_view name, std::int64_t missing = 0) const;
  std::span<const std::int64_t> integers(std::string_view name) const;
  std::span<const std::byte> bytes(std::string_view name) const;
  const Attributes& dictionary(std::string_view name) const;

  // The names "0", "1", ... of a dictionary that stands for a list, as far as they go.
  std::vector<std::string> places() const;

  // Takes a dictionary out.
  Attributes take_dictionary(std::string_view name);

 private:
  callgate_attribute& add(std::string_view name, int kind, DType dtype, const void* bytes,
                          std::size_t size, std::size_t count);

  const callgate_attribute* find(std::string_view name, int kind, const char* expected) const;
  const callgate_attribute* numbers(std::string_view name, DType dtype, const char* expected) const;

  Attributes& nested(const callgate_attribute& value) const;  // of entries, at least one

  // Memory of the names, the elements and the nested values; none of it moves.
  std::vector<std::unique_ptr<std::byte[]>> memory_;
  std::vector<std::unique_ptr<Attributes>> nested_;
  std::vector<callgate_attribute> values_;
};

}  // namespace callgate
