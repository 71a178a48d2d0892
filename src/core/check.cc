// See the header.
#include "core/check.h"

#include <cstring>
#include <utility>

namespace callgate {
namespace {

class CheckSite final : public Site {
 public:
  explicit CheckSite(std::shared_ptr<Site> failed) : failed_(std::move(failed)) {}

  Outcome run(const Call& call) override {
    const ArrayView& predicate = call.operands[0];
    std::size_t count = predicate.size();
    if (count == 0 || std::memchr(predicate.data, 0, count) == nullptr) return Outcome::success();
    return failed_->run(call);
  }

 private:
  std::shared_ptr<Site> failed_;
};

}  // namespace

std::shared_ptr<Site> CheckCallee::specialise(SiteSpec spec) {
  return std::make_shared<CheckSite>(failed_->specialise(std::move(spec)));
}

}  // namespace callgate
