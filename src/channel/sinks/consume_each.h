// How native sinks go through a batch: a record that a sink refuses does not take the others along.
#pragma once

#include <exception>
#include <span>

#include "channel/record.h"

namespace callgate {

// Calls take(record) for each record, whatever some of them throw, then finish(), then throws the
// first exception of these.
template <typename Take, typename Finish>
void consume_each(std::span<const Record> records, Take&& take, Finish&& finish) {
  std::exception_ptr first;
  auto keep_first = [&](auto&& step) {
    try {
      step();
    } catch (...) {
      if (first == nullptr) first = std::current_exception();
    }
  };
  for (const Record& record : records) keep_first([&] { take(record); });
  keep_first(finish);
  if (first != nullptr) std::rethrow_exception(first);
}

}  // namespace callgate
