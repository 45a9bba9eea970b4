// The page and what belongs to it, inside the program.
#ifndef PHSA_SERVER_STATIC_FILES_H_
#define PHSA_SERVER_STATIC_FILES_H_

#include <string_view>

namespace phsa::server {

struct StaticFile {
  const char* path;
  const char* content_type;
  std::string_view text;
};

// Null where there is none.
const StaticFile* FindStaticFile(std::string_view path);
std::string_view OpenApiText();  // docs/openapi.json

}  // namespace phsa::server

#endif  // PHSA_SERVER_STATIC_FILES_H_
