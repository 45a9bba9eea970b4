// The command lines of the benchmarks: flags with a value, which may be a list with commas.
#ifndef PHSA_BENCH_COMMAND_LINE_H_
#define PHSA_BENCH_COMMAND_LINE_H_

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

struct CommandLine {
  const char* program;
  const char* options;  // what --help prints

  [[noreturn]] void Refuse(const std::string& problem) const {
    std::fprintf(stderr, "%s: %s\n%s", program, problem.c_str(), options);
    std::exit(2);
  }

  // take(flag, value) is false for a flag that nobody knows; `no_value`: a flag that has none.
  template <class Take>
  void Read(int argc, char** argv, std::string_view no_value, const Take& take) const {
    for (int i = 1; i < argc; ++i) {
      const std::string flag = argv[i];
      if (flag == "--help") {
        std::fputs(options, stdout);
        std::exit(0);
      }
      if (flag != no_value && i + 1 >= argc) Refuse(flag + " needs a value");
      if (!take(flag, flag == no_value ? std::string() : std::string(argv[++i]))) Refuse("unknown option " + flag);
    }
  }
};

inline std::vector<std::string> Split(const std::string& text) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

#endif  // PHSA_BENCH_COMMAND_LINE_H_
