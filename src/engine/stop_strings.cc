#include "engine/stop_strings.h"

#include <algorithm>
#include <utility>

namespace phsa {

StopStrings::StopStrings(std::vector<std::string> stops) : stops_(std::move(stops)) {
  std::erase_if(stops_, [](const std::string& stop) { return stop.empty(); });
}

std::string StopStrings::Next(std::string_view text) {
  if (stopped_) return "";
  held_ += text;
  size_t found = std::string::npos;
  for (const std::string& stop : stops_) found = std::min(found, held_.find(stop));
  if (found != std::string::npos) {
    stopped_ = true;
    held_.resize(found);
    return std::exchange(held_, "");
  }
  // The longest end of the text that a stop string begins with.
  size_t keep = 0;
  for (const std::string& stop : stops_) {
    for (size_t length = std::min(stop.size() - 1, held_.size()); length > keep; --length) {
      if (std::string_view(held_).substr(held_.size() - length) == std::string_view(stop).substr(0, length)) {
        keep = length;
        break;
      }
    }
  }
  std::string shown = held_.substr(0, held_.size() - keep);
  held_.erase(0, shown.size());
  return shown;
}

std::string StopStrings::Finish() { return stopped_ ? "" : std::exchange(held_, ""); }

}  // namespace phsa
