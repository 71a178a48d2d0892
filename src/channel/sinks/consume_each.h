// How native sinks go through a batch: a record that a sink refuses does not take the others along.
#pragma once

#include <exception>
#include <span>

#include "channel/consumer.h"

namespace callgate {

// Calls take(record) for each record, whatever some of them throw, then finish(), then throws the
// first exception of these. A record for which take() throws is lost; finish() counts for itself.
template <typename Take, typename Finish>
void consume_each(Consumer& consumer, std::span<const Record> records, Take&& take,
                  Finish&& finish) {
  std::exception_ptr first;
  auto succeeds = [&](auto&& step) {
    try {
      step();
      return true;
    } catch (...) {
      if (first == nullptr) first = std::current_exception();
      return false;
    }
  };
  for (const Record& record : records) {
    if (!succeeds([&] { take(record); })) consumer.lose(1);
  }
  (void)succeeds(finish);
  if (first != nullptr) std::rethrow_exception(first);
}

// Visits the lanes of a record in a take(). Of those that fail, all are lost but the one that
// consume_each() counts.
template <typename Visit>
void visit_lanes(Consumer& consumer, RecordViews& views, const Record& record, Visit&& visit) {
  try {
    views.each_lane(record, visit);
  } catch (...) {
    if (views.failed() > 1) consumer.lose(views.failed() - 1);
    throw;
  }
}

}  // namespace callgate
