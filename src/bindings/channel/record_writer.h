// Hands records that Python made to a native consumer, in the form in which a channel does.
//
// For sinks that are used without a channel. A writer is used by one thread at a time, and not
// while a channel feeds its consumer. The consumer runs without the GIL.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/channel/consumer.h"
#include "channel/record.h"

namespace callgate::bindings {

// One leaf as Python gives it: its path as keystr writes it, the code of its dtype, its extents,
// and its bytes as XLA would have them.
using LeafArgument = std::tuple<std::string, int, std::vector<std::int64_t>, nb::bytes>;

class RecordWriter {
 public:
  explicit RecordWriter(const ConsumerHandle& handle) : consumer_(handle.consumer) {}
  RecordWriter(RecordWriter&&) = default;  // no copies: consumers know sources by their address

  void write(const std::string& name, int role, const std::vector<LeafArgument>& leaves,
             std::uint64_t seq, std::int64_t time_ns, std::int64_t run, std::int32_t device,
             bool repeated, const std::vector<std::int64_t>& lane);
  void open();
  void flush();
  void close();

 private:
  const Source& source(const std::string& name, Role role, const std::vector<LeafArgument>& leaves,
                       const std::vector<std::int64_t>& levels);

  std::shared_ptr<Consumer> consumer_;
  std::map<std::string, std::unique_ptr<Source>> sources_;  // by all that a source consists of
};

}  // namespace callgate::bindings
