// K, parts and lambda in a line of JSON: only where they mean something, and as they were given.
#ifndef PHSA_CLI_BUDGET_JSON_H_
#define PHSA_CLI_BUDGET_JSON_H_

#include "attention/policies.h"
#include "base/as_given.h"
#include "engine/attention_choice.h"

namespace phsa::cli {

template <class Json>
void AddBudget(const Settings& settings, Json* line) {
  if (Chooses(settings.policy)) (*line)["top_k"] = settings.top_k;
  if (HasMeans(settings.policy) && settings.parts > 1) {
    (*line)["parts"] = settings.parts;
    (*line)["survivors"] = settings.survivors;
  }
  if (!Weighs(settings.policy)) return;
  Json& lambda = (*line)["lambda"];
  lambda = AsGiven(settings.lambda);
  if (settings.head_lambda.empty()) return;
  lambda = Json::array();
  for (const float one : settings.head_lambda) lambda.push_back(AsGiven(one));
}

}  // namespace phsa::cli

#endif  // PHSA_CLI_BUDGET_JSON_H_
