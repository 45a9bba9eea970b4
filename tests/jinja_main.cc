// jinja_of: lines of JSON {"template", "variables"} to lines {"text"} or {"error"}: what the end-to-end tests compare
// with Python's jinja2.
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "jinja/template.h"
#include "phsa/error.h"

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    const nlohmann::json input = nlohmann::json::parse(line);
    nlohmann::json output;
    try {
      const auto program = phsa::jinja::Template::Parse(input["template"].get<std::string>());
      // Read again, for the order of its keys.
      const phsa::jinja::Value all = phsa::jinja::FromJson(line, "the line");
      phsa::jinja::Template::Variables variables;
      for (const auto& [key, value] : all.dict().Find("variables")->dict().items()) variables[key.bytes()] = value;
      output["text"] = program.Render(variables, line.size()).bytes();
    } catch (const phsa::Error& error) {
      output["error"] = error.what();
    }
    std::puts(output.dump().c_str());
  }
}
