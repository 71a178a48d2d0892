// SPDX-License-Identifier: Apache-2.0
// Two filters for time series that don't vectorise over time, so XLA has no good form for them.
#include <algorithm>
#include <vector>

#include "callgate/kernel.h"

namespace filters {

// y[t] = the median of the `2 * reach + 1` values around x[t]; less at the ends.
void median(cg::Attr<int32_t> reach, cg::In<float, 1> x, cg::Out<float, 1> y) {
  std::vector<float> window;
  for (int64_t t = 0; t < x.size(); ++t) {
    int64_t first = std::max<int64_t>(0, t - reach);
    int64_t last = std::min<int64_t>(x.size(), t + reach + 1);
    window.assign(x.begin() + first, x.begin() + last);
    auto middle = window.begin() + (last - first) / 2;
    std::nth_element(window.begin(), middle, window.end());
    y[t] = *middle;
  }
}

// y[t] = decay y[t-1] + (1 - decay) x[t]; also gives the last value, to go on from.
void smooth(float decay, cg::In<float, 1> x, cg::Out<float, 1> y, cg::Out<float, 0> last) {
  float value = x.empty() ? 0 : x[0];
  for (int64_t t = 0; t < x.size(); ++t) y[t] = value = decay * value + (1 - decay) * x[t];
  last() = value;
}

}  // namespace filters

CALLGATE_KERNEL_AS(median, filters::median, reach, x, y);
CALLGATE_KERNEL_AS(smooth, filters::smooth, decay, x, y, last);
