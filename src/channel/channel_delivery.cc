// How a channel's own thread calls the consumers.
#include <algorithm>
#include <utility>

#include "channel/channel.h"

namespace callgate {
namespace {

// Who is named where a channel has failed by itself.
class Itself final : public Consumer {
 public:
  void consume(std::span<const Record> /*records*/) override {}
  std::string description() const override { return "the sending"; }
};

// The large payloads of the batch that this thread delivers, while they may be lent.
thread_local const std::vector<std::shared_ptr<SideBlock>>* t_lender = nullptr;

}  // namespace

void Channel::deliver() noexcept {
  bool shared = std::ranges::any_of(
      batch_, [](const Record& record) { return record.source->consumer != nullptr; });
  for (std::size_t i = 0; i < current_.size(); ++i) {
    std::shared_ptr<Consumer> consumer = current_[i];  // remove() may take it out meanwhile
    if (consumer != nullptr)
      hand_over(*consumer, batch_, /*last=*/!shared && i + 1 == current_.size());
  }
  // Runs of records whose sources share a consumer of their own.
  std::span<const Record> rest(batch_);
  while (!rest.empty()) {
    Consumer* consumer = rest.front().source->consumer.get();
    auto end = std::ranges::find_if(
        rest, [&](const Record& record) { return record.source->consumer.get() != consumer; });
    auto count = static_cast<std::size_t>(end - rest.begin());
    if (consumer != nullptr) hand_over(*consumer, rest.first(count), /*last=*/true);
    rest = rest.subspan(count);
  }
}

void Channel::hand_over(Consumer& consumer, std::span<const Record> records, bool last) noexcept {
  t_lender = last ? &taken_aside_ : nullptr;
  const std::uint64_t lost = consumer.lost();
  tell(consumer, [&] {
    if (consumer.takes_device_arrays()) return consumer.consume(records);
    hand_over_host_arrays(consumer, records);
  });
  t_lender = nullptr;
  lost_.fetch_add(consumer.lost() - lost, std::memory_order_relaxed);  // this thread's; a gauge
}

// To a consumer that can't read a device: without the records of sources that are for those who
// can. Throws Error when there were any, after the others.
void Channel::hand_over_host_arrays(Consumer& consumer, std::span<const Record> records) {
  auto refused = [](const Record& record) { return record.source->on_device; };
  auto first = std::ranges::find_if(records, refused);
  if (first == records.end()) return consumer.consume(records);
  const std::string& name = first->source->name;
  while (!records.empty()) {
    auto end = std::ranges::find_if(records, refused);
    auto count = static_cast<std::size_t>(end - records.begin());
    if (count != 0) consumer.consume(records.first(count));
    records = records.subspan(count);
    while (!records.empty() && refused(records.front())) records = records.subspan(1);
  }
  throw Error(ErrorCode::kInvalidArgument, "channel '" + options_.name + "'",
              "consumers in Python, called for each record, of tap '" + name +
                  "', which has on_device=True",
              consumer.description());
}

std::shared_ptr<void> Channel::lend(const Record& record) noexcept {
  if (t_lender == nullptr) return nullptr;
  for (const auto& block : *t_lender)
    if (block->data == record.payload) return block;
  return nullptr;
}

// What one consumer throws is nobody else's business.
template <typename Action>
void Channel::tell(Consumer& consumer, Action&& action) noexcept {
  auto report = [&](const char* what) {
    try {
      on_error_(*this, consumer, what);
    } catch (...) {  // NOLINT(bugprone-empty-catch): nobody is left to be told
    }
  };
  try {
    action();
  } catch (const std::exception& error) {
    report(error.what());
  } catch (...) {
    report("an unknown C++ exception");
  }
}

// All that take part in a delivery, which they leave.
void Channel::tell_current(void (Consumer::*what)()) noexcept {
  std::shared_ptr<Consumer> consumer;  // held: as in deliver()
  for (const auto& each : current_) {
    consumer = each;
    if (consumer != nullptr) tell(*consumer, [&] { ((*consumer).*what)(); });
  }
  current_.clear();
}

// Once, for all that senders and this thread have found no memory for.
void Channel::report_no_memory() noexcept {
  // Relaxed: see note_no_memory().
  std::size_t bytes = no_memory_.load(std::memory_order_relaxed);
  if (bytes <= 1) return;
  no_memory_.store(1, std::memory_order_relaxed);
  Itself itself;
  tell(itself, [&] {
    throw Error(ErrorCode::kInternal, "channel '" + options_.name + "'",
                "memory for a record of " + std::to_string(bytes) + " bytes",
                "none from the system: it is dropped, as all will be that find none; stats() "
                "counts them");
  });
}

}  // namespace callgate
