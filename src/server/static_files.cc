#include "server/static_files.h"

namespace phsa {

extern const std::string_view kWebIndex;  // web/index.html
extern const std::string_view kOpenApi;   // docs/openapi.json

namespace server {

const StaticFile* FindStaticFile(std::string_view path) {
  static const StaticFile files[] = {
      {"/", "text/html; charset=utf-8", kWebIndex},
  };
  for (const StaticFile& file : files) {
    if (path == file.path) return &file;
  }
  return nullptr;
}

std::string_view OpenApiText() { return kOpenApi; }

}  // namespace server
}  // namespace phsa
