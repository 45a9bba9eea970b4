#include "server/fields.h"

#include <cmath>

namespace phsa::server {
namespace {

// JSON knows one kind of number: 5.0 is 5.
void WholeNumbersAsIntegers(Json& value) {
  constexpr double kExact = 9007199254740992;  // 2^53
  if (value.is_number_float()) {
    const double number = value.get<double>();
    if (std::trunc(number) == number && std::abs(number) <= kExact) value = static_cast<int64_t>(number);
  } else if (value.is_structured()) {
    for (Json& inner : value) WholeNumbersAsIntegers(inner);  // as deep as the parser lets it be
  }
}

}  // namespace

Json ParseBody(std::string_view body) {
  try {
    Json json = ParseJsonObject(body, "the request's body");
    WholeNumbersAsIntegers(json);
    return json;
  } catch (const Error& error) {
    throw HttpError(400, error.what());
  }
}

}  // namespace phsa::server
