// Text as it comes, minus what may still turn out to be the beginning of a stop string.
#ifndef PHSA_ENGINE_STOP_STRINGS_H_
#define PHSA_ENGINE_STOP_STRINGS_H_

#include <string>
#include <string_view>
#include <vector>

namespace phsa {

class StopStrings {
 public:
  explicit StopStrings(std::vector<std::string> stops);
  // What can be shown now. After a stop string was found, stopped() is true and everything from it on is dropped.
  std::string Next(std::string_view text);
  std::string Finish();  // what was held back; nothing more comes
  bool stopped() const { return stopped_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace phsa

#endif  // PHSA_ENGINE_STOP_STRINGS_H_
