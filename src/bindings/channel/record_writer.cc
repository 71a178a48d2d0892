// A record of one lane is written as a batch of which `where` sends this lane alone: consumers see
// lanes in no other way.
#include "bindings/channel/record_writer.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstring>
#include <limits>

#include "bindings/python/gil.h"
#include "core/error.h"

namespace callgate::bindings {
namespace {

struct alignas(kRecordAlignment) Block {
  char bytes[kRecordAlignment];
};

// Counts down from the top: the channels' sources count up.
std::uint64_t next_id() {
  static std::atomic<std::uint64_t> next{std::numeric_limits<std::uint64_t>::max()};
  return next.fetch_sub(1, std::memory_order_relaxed);  // unique, in no order with anything
}

DType dtype_of(int code) {
  auto dtype = dtype_from_code(code);
  if (dtype) return *dtype;
  throw Error(ErrorCode::kInvalidArgument, "a record", "a dtype's code", std::to_string(code));
}

void add_leaf(Source& source, std::string path, DType dtype, std::vector<std::int64_t> dims) {
  LeafType leaf{std::move(path), dtype, std::move(dims), source.payload_bytes, 0};
  std::size_t count = 1;
  for (std::int64_t extent : leaf.dims) count *= static_cast<std::size_t>(extent);
  leaf.nbytes = storage_bytes(dtype, count);
  source.payload_bytes += align_record(leaf.nbytes);
  source.leaves.push_back(std::move(leaf));
}

// Extents of batch levels that have the lane; few of them, so that many lanes share a source.
std::vector<std::int64_t> levels_of(const std::vector<std::int64_t>& lane) {
  std::vector<std::int64_t> levels;
  for (std::int64_t index : lane) {
    if (index < 0) {
      throw Error(ErrorCode::kInvalidArgument, "a record's lane", "indices from 0",
                  std::to_string(index));
    }
    levels.push_back(
        static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(index) + 1)));
  }
  return levels;
}

std::string key_of(const std::string& name, Role role, const std::vector<LeafArgument>& leaves,
                   const std::vector<std::int64_t>& levels) {
  std::string key = name;
  (key += '\0') += std::to_string(static_cast<int>(role));
  for (std::int64_t extent : levels) (key += ' ') += std::to_string(extent);
  for (const auto& [path, code, dims, bytes] : leaves) {
    (((key += '\0') += path) += '\0') += std::to_string(code);
    for (std::int64_t extent : dims) (key += ' ') += std::to_string(extent);
  }
  return key;
}

}  // namespace

const Source& RecordWriter::source(const std::string& name, Role role,
                                   const std::vector<LeafArgument>& leaves,
                                   const std::vector<std::int64_t>& levels) {
  std::unique_ptr<Source>& found = sources_[key_of(name, role, leaves, levels)];
  if (found != nullptr) return *found;
  auto made = std::make_unique<Source>();
  made->id = next_id();
  made->name = name;
  made->role = role;
  for (const auto& [path, code, dims, bytes] : leaves) add_leaf(*made, path, dtype_of(code), dims);
  made->value_leaves = leaves.size();
  if (!levels.empty()) {
    std::vector<std::int64_t> masks;  // `where` alone is batched
    for (std::size_t level = 0; level < levels.size(); ++level) {
      masks.insert(masks.end(), leaves.size(), 0);
      masks.push_back(1);
    }
    made->lanes = Lanes(levels, masks);
    made->has_where = true;
    add_leaf(*made, "", DType::kPred, levels);
  }
  found = std::move(made);
  return *found;
}

void RecordWriter::write(const std::string& name, int role, const std::vector<LeafArgument>& leaves,
                         std::uint64_t seq, std::int64_t time_ns, std::int64_t run,
                         std::int32_t device, bool repeated,
                         const std::vector<std::int64_t>& lane) {
  const std::vector<std::int64_t> levels = levels_of(lane);
  const Source& from = source(name, static_cast<Role>(role), leaves, levels);
  std::vector<Block> blocks(from.payload_bytes / sizeof(Block) + 1);
  char* payload = blocks.front().bytes;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const nb::bytes& bytes = std::get<3>(leaves[i]);
    if (bytes.size() != from.leaves[i].nbytes) {
      throw Error(ErrorCode::kInvalidArgument, "leaf '" + from.leaves[i].path + "' of a record",
                  std::to_string(from.leaves[i].nbytes) + " bytes", std::to_string(bytes.size()));
    }
    std::memcpy(payload + from.leaves[i].offset, bytes.c_str(), bytes.size());
  }
  if (from.has_where) {
    std::size_t position = 0;
    for (std::size_t level = 0; level < lane.size(); ++level) {
      position = position * static_cast<std::size_t>(levels[level]) +
                 static_cast<std::size_t>(lane[level]);
    }
    payload[from.leaves.back().offset + position] = 1;
  }
  const Record record{&from,  seq, time_ns, run, device, repeated ? std::uint32_t{kRepeated} : 0U,
                      payload};
  without_gil([&] { consumer_->consume({&record, 1}); });
}

void RecordWriter::open() {
  without_gil([&] { consumer_->open(); });
}

void RecordWriter::flush() {
  without_gil([&] { consumer_->flush(); });
}

void RecordWriter::close() {
  without_gil([&] { consumer_->close(); });
}

}  // namespace callgate::bindings
