// SPDX-License-Identifier: Apache-2.0
// Writes and reads messages in the form of protocol.h.
#include "workers/message.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "core/system.h"

namespace callgate {

// The source and destination of each lane's operands in a piece. Data that several lanes share is
// written once.
struct LaneArrays::Sources {
  struct Copy {
    const void* from;
    std::uint64_t to;
    std::size_t bytes;
  };
  std::vector<std::uint64_t> places;  // per lane, of all operands
  std::vector<Copy> copies;

  Sources(const LaneArrays& arrays, const Piece& piece, Layout& layout) {
    const std::span<const ArrayView> whole = arrays.call_.operands;
    const auto lanes = static_cast<std::size_t>(piece.count);
    std::vector<ArrayView> views(whole.begin(), whole.end());
    std::vector<const void*> from(lanes * whole.size());
    for (std::size_t lane = 0; lane < lanes; ++lane) {
      if (arrays.lanes_ != nullptr)
        arrays.lanes_->select_operands(piece.first + static_cast<std::int64_t>(lane) * piece.step,
                                       whole, views);
      for (std::size_t i = 0; i < whole.size(); ++i) from[lane * whole.size() + i] = views[i].data;
    }
    places.resize(from.size());
    for (std::size_t i = 0; i < whole.size(); ++i) {
      const std::size_t bytes = views.empty() ? 0 : views[i].nbytes();
      const void* before = nullptr;
      for (std::size_t at = i; at < from.size(); at += whole.size()) {
        if (at != i && from[at] == before) {
          places[at] = places[at - whole.size()];
        } else {
          places[at] = layout.take(bytes, at == i ? kAlignment : 1);
          add({from[at], places[at], bytes});
        }
        before = from[at];
      }
    }
  }

  // Adjacent copies are merged.
  void add(const Copy& copy) {
    if (copy.bytes == 0) return;
    if (!copies.empty()) {
      Copy& last = copies.back();
      if (static_cast<const char*>(last.from) + last.bytes == copy.from &&
          last.to + last.bytes == copy.to) {
        last.bytes += copy.bytes;
        return;
      }
    }
    copies.push_back(copy);
  }
};

ArrayView LaneArrays::of_lane(const ArrayView& whole) const noexcept {
  const auto levels = lanes_ == nullptr ? 0 : lanes_->axes();
  return {whole.data, whole.dims + levels, whole.rank - levels, whole.dtype};
}

std::size_t LaneArrays::bytes_of_lane() const {
  if (count() == 0) return 0;
  std::vector<ArrayView> views(call_.operands.begin(), call_.operands.end());
  if (lanes_ != nullptr) lanes_->select_operands(0, call_.operands, views);
  std::size_t bytes = 0;
  for (const ArrayView& view : views) bytes += view.nbytes();
  for (const ArrayView& view : call_.results) bytes += of_lane(view).nbytes();
  return bytes;
}

void LaneArrays::ask(Worker& worker, const Piece& piece,
                     std::span<const Definition* const> definitions,
                     std::span<const std::uint64_t> forgotten, const Claim& claim,
                     const Asked& how) const {
  const std::size_t operands = call_.operands.size(), results = call_.results.size();
  std::vector<const Definition*> news;
  for (const Definition* definition : definitions)
    if (!worker.known.contains(definition->id)) news.push_back(definition);

  for (std::uint64_t id : forgotten) worker.known.erase(id);

  Request request;
  request.check_writes = how.check_writes ? 1 : 0;
  request.first_lane = how.first_lane;
  request.site = definitions.back()->id;
  request.device = call_.context.device;
  request.run = call_.context.run;
  request.first = piece.first;
  request.step = piece.step;
  request.lanes = static_cast<std::uint64_t>(piece.count);
  request.operands = static_cast<std::uint32_t>(operands);
  request.results = static_cast<std::uint32_t>(results);
  request.definitions = static_cast<std::uint32_t>(news.size());
  request.forgotten = static_cast<std::uint32_t>(forgotten.size());

  Layout layout;
  request.arrays = layout.take((operands + results) * sizeof(ArrayHead));
  request.definition_heads = layout.take(news.size() * sizeof(DefinitionHead));
  request.forgotten_ids = layout.take(forgotten.size() * sizeof(std::uint64_t));
  std::vector<ArrayHead> heads;
  std::vector<std::int64_t> dims;
  std::vector<ArrayView> lane(call_.operands.begin(), call_.operands.end());
  if (lanes_ != nullptr && piece.count > 0) lanes_->select_operands(0, call_.operands, lane);
  for (const ArrayView& view : call_.results) lane.push_back(of_lane(view));
  for (const ArrayView& view : lane) {
    heads.push_back({static_cast<std::uint32_t>(view.dtype), view.rank, dims.size(), 0});
    dims.insert(dims.end(), view.shape().begin(), view.shape().end());
  }
  const std::uint64_t dims_at = layout.take(dims.size() * sizeof(std::int64_t));
  for (ArrayHead& head : heads) head.dims = dims_at + head.dims * sizeof(std::int64_t);
  request.places = layout.take(static_cast<std::size_t>(piece.count) * operands * 8);
  std::vector<DefinitionHead> definition_heads;
  definition_heads.reserve(news.size());
  for (const Definition* one : news)
    definition_heads.push_back(
        {one->id, one->of, {layout.take(one->bytes.size()), one->bytes.size()}});
  const Sources sources(*this, piece, layout);
  for (std::size_t i = 0; i < results; ++i)
    heads[operands + i].data = layout.take(
        lane[operands + i].nbytes() * static_cast<std::size_t>(piece.count), kAlignment);

  worker.memory.grow(layout.end());
  std::byte* base = worker.memory.data();
  auto put = [base](std::uint64_t offset, const void* from, std::size_t bytes) {
    if (bytes != 0) std::memcpy(base + offset, from, bytes);
  };
  put(request.arrays, heads.data(), heads.size() * sizeof(ArrayHead));
  put(dims_at, dims.data(), dims.size() * sizeof(std::int64_t));
  put(request.places, sources.places.data(), sources.places.size() * sizeof(std::uint64_t));
  put(request.forgotten_ids, forgotten.data(), forgotten.size() * sizeof(std::uint64_t));
  put(request.definition_heads, definition_heads.data(),
      definition_heads.size() * sizeof(DefinitionHead));
  for (std::size_t i = 0; i < news.size(); ++i) {
    put(definition_heads[i].bytes.offset, news[i]->bytes.data(), news[i]->bytes.size());
    worker.known.insert(news[i]->id);
  }
  for (const Sources::Copy& copy : sources.copies) put(copy.to, copy.from, copy.bytes);
  // A result that shares an operand's memory begins with its content, for functions that write in
  // place.
  for (std::size_t i = 0; i < results; ++i) {
    const ArrayView& view = call_.results[i];
    const bool in_place =
        how.send_results || std::ranges::any_of(call_.operands, [&](const ArrayView& operand) {
          return operand.data == view.data && operand.nbytes() == view.nbytes();
        });
    const std::size_t bytes = lane[operands + i].nbytes();
    for (std::int64_t k = 0; in_place && k < piece.count; ++k)
      put(heads[operands + i].data + static_cast<std::size_t>(k) * bytes,
          static_cast<const char*>(view.data) +
              static_cast<std::size_t>(piece.first + k * piece.step) * bytes,
          bytes);
  }
  *at<Request>(base, kMessages) = request;
  WorkerControl& control = control_of(worker.memory);
  control.call = claim.number;
  control.asked_on = current_core();
  control.bytes = worker.memory.size();
  ++worker.asked;
  control.requests.add();
}

void LaneArrays::take_results(const Worker& worker, const Piece& piece) const {
  std::byte* base = worker.memory.data();
  const Request& request = request_of(worker.memory);
  const auto* heads = at<ArrayHead>(base, request.arrays) + call_.operands.size();
  for (std::size_t i = 0; i < call_.results.size(); ++i) {
    const std::size_t bytes = of_lane(call_.results[i]).nbytes();
    if (bytes == 0) continue;
    auto* to = static_cast<std::byte*>(call_.results[i].data);
    const std::byte* from = base + heads[i].data;
    const auto count = static_cast<std::size_t>(piece.count);
    const auto first = static_cast<std::size_t>(piece.first);
    if (piece.step == 1) {
      std::memcpy(to + first * bytes, from, count * bytes);
      continue;
    }
    for (std::size_t k = 0; k < count; ++k)
      std::memcpy(to + (first + k * static_cast<std::size_t>(piece.step)) * bytes, from + k * bytes,
                  bytes);
  }
}

}  // namespace callgate
