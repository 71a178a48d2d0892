// The sink JSONL: a line of JSON for each lane of each record. https://jsonlines.org
//
//   {"name":"loss","seq":3,"time_ns":1700000000000000000,"device":0,"run":7,"role":"primal",
//    "lane":[2],"repeated":true,"value":0.25}                       (on one line in the file)
//
// "lane" is there for taps that vmap met, one index a batch level, outermost first; "repeated"
// where the tap ran before in the same execution. "value" is a number or nested lists for a lone
// leaf, else an object from each leaf's path ("w/0") to these.
//
// Floats have the fewest digits that give back the same value (of float32 for smaller types), and
// always a point or an exponent, so that they stay floats. JSON has no infinities: they and NaN are
// the strings "NaN", "Infinity" and "-Infinity", which Python's float() takes. A complex number is
// [real, imaginary]. https://www.rfc-editor.org/rfc/rfc8259
//
// Runs on its channel's thread, without the GIL; other threads may use it as well. Whole lines
// reach the system with every batch of records, so a process that dies leaves a file that can be
// read, and one that finds no room for all of a batch the lines that found some.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "channel/consumer.h"
#include "channel/first_error.h"
#include "channel/sinks/file.h"

namespace callgate {

// `text`, UTF-8, as a JSON string with its quotes.
void append_json_string(std::string& out, std::string_view text);

// A number for rank 0, else lists nested to the array's rank.
void append_json_array(std::string& out, const ArrayView& view);

class JsonlSink final : public Consumer {
 public:
  // Opens the file, so that a path that cannot be written is an error here. With kAppend, lines are
  // added to a file that exists, to which other processes may append as well; a last line that a
  // crash left unfinished is cut off. After close(), further records open the file again and are
  // appended.
  JsonlSink(std::string path, FileMode mode);

  void open() override;
  void consume(std::span<const Record> records) override;
  void close() override;
  std::string description() const override { return "JSONL('" + path_ + "')"; }

 private:
  // What the lines of one source share.
  struct Layout {
    explicit Layout(const Source& source);
    std::string head;                // {"name":"loss"
    std::string role;                // ,"role":"primal"
    std::vector<std::string> keys;   // of each value leaf, with the quotes: "w/0":
    bool lone = false;               // the value is the one leaf itself
    std::vector<std::int64_t> lane;  // scratch: the index of the current lane
    RecordViews views;
  };

  void open_file(FileMode mode);
  void append_record(const Record& record);
  void append_line(const Record& record, Layout& layout, std::int64_t lane,
                   std::span<const ArrayView> leaves);
  void write_out();

  std::mutex mutex_;  // guards what follows: Python may write and close beside a channel
  std::string path_;
  const Place place_;
  std::unique_ptr<LineFile> file_;                     // none while closed
  std::unordered_map<std::uint64_t, Layout> layouts_;  // by Source::id
  std::string lines_;                                  // not yet in the file
  FirstError failure_;                                 // to write the batch
};

}  // namespace callgate
