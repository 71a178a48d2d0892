// How native sinks go through a batch: a record that a sink refuses does not take the others along.
#pragma once

#include <span>

#include "channel/consumer.h"
#include "channel/first_error.h"

namespace callgate {

// Calls begin(), take(record) for each record, whatever some of them throw, then finish(), then
// throws the first exception of these. Where begin() throws, all records are lost; a record for
// which take() throws is lost; finish() counts for itself.
template <typename Begin, typename Take, typename Finish>
void consume_each(Consumer& consumer, std::span<const Record> records, Begin&& begin, Take&& take,
                  Finish&& finish) {
  FirstError errors;
  if (!errors.survives(begin)) {
    consumer.lose(records.size());
    return errors.rethrow();
  }
  for (const Record& record : records) {
    if (!errors.survives([&] { take(record); })) consumer.lose(1);
  }
  errors.survives(finish);
  errors.rethrow();
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
