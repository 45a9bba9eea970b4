#include "server/static_files.h"

namespace phsa {

extern const std::string_view kOpenApi;  // docs/openapi.json
// The files of web/; the first four are part of inspect's pages too, and come with eval.
extern const std::string_view kWebTheme, kWebThemeScript, kWebExplorer, kWebExplorerScript;
extern const std::string_view kWebIndex, kWebIcon, kWebPage, kWebApi, kWebApp, kWebChat, kWebComparison,
    kWebConversations, kWebDocuments, kWebExplore, kWebMarkdown, kWebProgress, kWebSettings, kWebSources, kWebStore;

namespace server {

const StaticFile* FindStaticFile(std::string_view path) {
  static constexpr const char* kHtml = "text/html; charset=utf-8";
  static constexpr const char* kStyle = "text/css; charset=utf-8";
  static constexpr const char* kScript = "text/javascript; charset=utf-8";
  static const StaticFile files[] = {
      {"/", kHtml, kWebIndex},
      {"/api.js", kScript, kWebApi},
      {"/app.js", kScript, kWebApp},
      {"/chat.js", kScript, kWebChat},
      {"/comparison.js", kScript, kWebComparison},
      {"/conversations.js", kScript, kWebConversations},
      {"/documents.js", kScript, kWebDocuments},
      {"/explore.js", kScript, kWebExplore},
      {"/explorer.css", kStyle, kWebExplorer},
      {"/explorer.js", kScript, kWebExplorerScript},
      {"/icon.svg", "image/svg+xml", kWebIcon},
      {"/markdown.js", kScript, kWebMarkdown},
      {"/page.css", kStyle, kWebPage},
      {"/progress.js", kScript, kWebProgress},
      {"/settings.js", kScript, kWebSettings},
      {"/sources.js", kScript, kWebSources},
      {"/store.js", kScript, kWebStore},
      {"/theme.css", kStyle, kWebTheme},
      {"/theme.js", kScript, kWebThemeScript},
  };
  for (const StaticFile& file : files) {
    if (path == file.path) return &file;
  }
  return nullptr;
}

std::string_view OpenApiText() { return kOpenApi; }

}  // namespace server
}  // namespace phsa
