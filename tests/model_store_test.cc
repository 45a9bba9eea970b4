// Fetching is tested with a stand-in for Python, a script that copies wheels which the test has made: nothing here
// needs a network.
#include "io/model_store.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <zip.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <thread>

#include "io/model_source.h"
#include "io/sha256.h"
#include "io/store_files.h"
#include "model_files.h"
#include "refusal.h"

namespace phsa {
namespace {

namespace fs = std::filesystem;

class ScopedVariable {
 public:
  ScopedVariable(const char* name, const std::string& value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    setenv(name, value.c_str(), 1);
  }
  ~ScopedVariable() { old_ ? setenv(name_, old_->c_str(), 1) : unsetenv(name_); }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;

 private:
  const char* name_;
  std::optional<std::string> old_;
};

std::string ReadAll(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string SumOf(const std::string& text) {
  Sha256 sum;
  sum.Update(text.data(), text.size());
  return sum.Hex();
}

void WriteWheel(const fs::path& path, const std::string& member, const std::string& content) {
  fs::remove(path);
  zip_t* archive = zip_open(path.c_str(), ZIP_CREATE, nullptr);
  ASSERT_NE(archive, nullptr);
  ASSERT_GE(zip_file_add(archive, member.c_str(), zip_source_buffer(archive, content.data(), content.size(), 0), 0), 0);
  ASSERT_EQ(zip_close(archive), 0);
}

// What the stand-in does after it has noted its arguments in calls.txt: $dest and $package are what pip would be told.
constexpr const char* kCopy = "cp \"$here/$package.whl\" \"$dest/$package-1.0-py3-none-any.whl\"";

class Fetch : public testing::Test {
 protected:
  Fetch() {
    model_.name = "tiny";
    model_.file = "tiny.gguf";
    for (size_t i = 0; i < 3; ++i) {
      const std::string content(1'500'000 + 10 * i, static_cast<char>('a' + i));
      const std::string package = "tiny-part" + std::to_string(i + 1);
      WriteWheel(Wheel(i), "tiny/part.bin", content);
      model_.parts.push_back(
          {package, "1.0", "tiny/part.bin", content.size(), fs::file_size(Wheel(i)), SumOf(content)});
      whole_ += content;
    }
    model_.bytes = whole_.size();
    model_.sha256 = SumOf(whole_);
    model_.sample_sha256 = SampleSum(folder_.Write("whole", whole_));
    StandIn(kCopy);
  }

  fs::path Wheel(size_t index) const { return folder_.path() / ("tiny-part" + std::to_string(index + 1) + ".whl"); }

  void StandIn(const std::string& action) {
    const fs::path script =
        folder_.Write("python", "#!/bin/sh\nhere=" + folder_.path().string() +
                                    "\nwhile [ $# -gt 1 ]; do [ \"$1\" = --dest ] && dest=$2; shift; done\n"
                                    "package=${1%%==*}\necho \"$1\" >> \"$here/calls.txt\"\n" +
                                    action + "\n");
    chmod(script.c_str(), 0755);
  }

  // The packages that were asked for, one a line.
  std::string Calls() const { return ReadAll(folder_.path() / "calls.txt"); }

  fs::path Run() {
    return FetchModel(
        model_, [](const FetchProgress&) {}, [] { return false; });
  }

  // The message, where the fetch fails as it should.
  std::string Failure() {
    try {
      Run();
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), PHSA_IO);
      return error.what();
    }
    ADD_FAILURE() << "nothing was thrown";
    return "";
  }

  // Names of what the cache holds, without the lock.
  std::vector<std::string> Cached() const {
    std::vector<std::string> out;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder_.path() / "cache" / "models")) {
      if (entry.path().extension() != ".lock") out.push_back(entry.path().filename());
    }
    return out;
  }

  TempFolder folder_;
  ScopedVariable cache_{"PHSA_CACHE", (folder_.path() / "cache").string()};
  ScopedVariable python_{"PHSA_PYTHON", (folder_.path() / "python").string()};
  PackagedModel model_;
  std::string whole_;
};

TEST_F(Fetch, ThePartsAreJoinedCheckedAndKept) {
  EXPECT_TRUE(CachedModel(model_).empty());
  std::vector<FetchProgress> seen;
  const fs::path path = FetchModel(
      model_, [&](const FetchProgress& now) { seen.push_back(now); }, [] { return false; });
  EXPECT_EQ(path, folder_.path() / "cache" / "models" / "tiny.gguf");
  EXPECT_EQ(ReadAll(path), whole_);
  EXPECT_EQ(CachedModel(model_), path);
  EXPECT_EQ(Cached(), std::vector<std::string>{"tiny.gguf"});
  EXPECT_EQ(Calls(), "tiny-part1==1.0\ntiny-part2==1.0\ntiny-part3==1.0\n");
  ASSERT_FALSE(seen.empty());
  for (size_t i = 0; i < seen.size(); ++i) {
    EXPECT_EQ(seen[i].total, model_.parts[0].wheel_bytes + model_.parts[1].wheel_bytes + model_.parts[2].wheel_bytes);
    EXPECT_GE(seen[i].done, i == 0 ? 0 : seen[i - 1].done);
  }
  EXPECT_EQ(seen.back().what, "unpacking part 3 of 3");
  EXPECT_EQ(seen.back().done, seen.back().total);
  // Once it is there, nobody is asked.
  EXPECT_EQ(Run(), path);
  EXPECT_EQ(Calls(), "tiny-part1==1.0\ntiny-part2==1.0\ntiny-part3==1.0\n");
}

TEST_F(Fetch, AnInterruptedFetchGoesOnAfterItsLastWholePart) {
  bool stopped = false;
  const auto stop_in_part_2 = [&](const FetchProgress& now) { stopped = now.what == "unpacking part 2 of 3"; };
  try {
    FetchModel(model_, stop_in_part_2, [&] { return stopped; });
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "fetching tiny was interrupted; `phsa models fetch tiny` goes on from there");
  }
  EXPECT_EQ(Cached(), std::vector<std::string>{"tiny.gguf.part"});
  EXPECT_EQ(fs::file_size(StoreFilesOf(model_).partial), model_.parts[0].bytes);
  EXPECT_TRUE(CachedModel(model_).empty());
  EXPECT_EQ(ReadAll(Run()), whole_);
  EXPECT_EQ(Calls(), "tiny-part1==1.0\ntiny-part2==1.0\ntiny-part2==1.0\ntiny-part3==1.0\n");
}

TEST_F(Fetch, APartThatWasDamagedOnDiskIsFetchedAgain) {
  std::string damaged = whole_.substr(0, model_.parts[0].bytes + model_.parts[1].bytes) + "half a part";
  damaged[model_.parts[0].bytes + 5] ^= 1;
  fs::create_directories(StoreFilesOf(model_).folder);
  std::ofstream(StoreFilesOf(model_).partial, std::ios::binary) << damaged;
  EXPECT_EQ(ReadAll(Run()), whole_);
  EXPECT_EQ(Calls(), "tiny-part2==1.0\ntiny-part3==1.0\n");
}

TEST_F(Fetch, AModelThatWasDamagedAfterwardsIsNoticedByItsSampleAndFetchedAgain) {
  const fs::path path = Run();
  EXPECT_EQ(DamagedModel(model_), "");
  // The beginning, the end, and a hole as large as what a failing disk or an unfinished copy leaves.
  for (const auto& [at, count] : {std::pair<size_t, size_t>{0, 1}, {whole_.size() - 1, 1}, {2'000'000, 400'000}}) {
    std::string damaged = whole_;
    damaged.replace(at, count, count, '\0');
    std::ofstream(path, std::ios::binary) << damaged;
    EXPECT_EQ(CachedModel(model_), "");
    EXPECT_EQ(DamagedModel(model_), path);
    EXPECT_EQ(ReadAll(Run()), whole_);
  }
  fs::resize_file(path, 5);
  EXPECT_EQ(DamagedModel(model_), path);
}

TEST(SampleSum, SmallFilesCountWhole) {
  const TempFolder folder;
  std::string content(900'000, 'x');
  EXPECT_EQ(SampleSum(folder.Write("file", content)), SumOf(content));
  EXPECT_EQ(SampleSum(folder.Write("file", "")), SumOf(""));
  EXPECT_EQ(SampleSum(folder.path() / "none"), "");
}

TEST(PackagedModels, ADamagedOneIsRefusedWithWhatToDo) {
  const TempFolder folder;
  const ScopedVariable cache("PHSA_CACHE", folder.path().string());
  const fs::path file = folder.Write("models/SmolLM2-135M-Instruct.Q4_1.gguf", "GGUF");
  fs::resize_file(file, FindPackagedModel("smollm2-135m")->bytes);
  EXPECT_EQ(Refusal([] { ResolveModel("smollm2-135m"); }),
            file.string() +
                ": is not smollm2-135m as it was fetched: the file was damaged; run `phsa models fetch "
                "smollm2-135m` again");
}

TEST_F(Fetch, AStopEndsTheDownloadAtOnceAndLeavesNothing) {
  StandIn("echo $$ > \"$here/pid.txt\"; echo x > \"$TMPDIR/half\"; sleep 60; touch \"$here/survived\"");
  const auto start = std::chrono::steady_clock::now();
  const auto started = [&] { return fs::exists(folder_.path() / "pid.txt"); };
  EXPECT_THROW(FetchModel(
                   model_, [](const FetchProgress&) {}, started),
               Error);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
  EXPECT_TRUE(Cached().empty());
  const pid_t child = std::stoi(ReadAll(folder_.path() / "pid.txt"));
  EXPECT_EQ(kill(child, 0), -1);
}

TEST_F(Fetch, AWrongSumIsFetchedOnceMore) {
  std::string wrong(model_.parts[1].bytes, 'x');
  WriteWheel(folder_.path() / "wrong.whl", "tiny/part.bin", wrong);
  StandIn(
      "if [ \"$package\" = tiny-part2 ] && [ ! -e \"$here/once\" ]; then touch \"$here/once\"; package=wrong; fi\n" +
      std::string(kCopy));
  EXPECT_EQ(ReadAll(Run()), whole_);
  EXPECT_EQ(Calls(), "tiny-part1==1.0\ntiny-part2==1.0\ntiny-part2==1.0\ntiny-part3==1.0\n");
}

TEST_F(Fetch, ASumThatStaysWrongIsRefusedWithBothSums) {
  const std::string wrong(model_.parts[0].bytes, 'x');
  WriteWheel(Wheel(0), "tiny/part.bin", wrong);
  EXPECT_EQ(Failure(), "tiny/part.bin of tiny-part1==1.0 has the sha256 " + SumOf(wrong) +
                           "; expected: " + model_.parts[0].sha256 + ": the package index serves something else");
  EXPECT_TRUE(Cached().empty());
}

TEST_F(Fetch, AWheelThatIsNotWhatItShouldBeIsRefused) {
  const std::string wheel = (StoreFilesOf(model_).work / "wheel" / "tiny-part1-1.0-py3-none-any.whl").string();
  WriteWheel(Wheel(0), "tiny/part.bin", "short");
  EXPECT_EQ(Failure(), wheel + ": tiny/part.bin has 5 bytes; expected: 1500000");
  WriteWheel(Wheel(0), "tiny/other.bin", "short");
  EXPECT_EQ(Failure(), wheel + ": has no file tiny/part.bin");
  folder_.Write("tiny-part1.whl", "<html>");
  EXPECT_TRUE(Failure().starts_with(wheel + ": is not a wheel that can be read"));
  StandIn("true");
  EXPECT_EQ(Failure(), (folder_.path() / "python").string() + ": pip brought no wheel of tiny-part1==1.0");
  EXPECT_TRUE(Cached().empty());
}

TEST_F(Fetch, WhatPipSaysLastIsInTheMessage) {
  StandIn("echo looking; echo 'ERROR: No matching distribution found' >&2; echo; exit 1");
  EXPECT_EQ(Failure(),
            "pip could not download tiny-part1==1.0 (exit code 1): ERROR: No matching distribution found; check the "
            "network, the proxy and pip's index");
  StandIn("echo \"$0: No module named pip\" >&2; exit 1");
  const std::string python = (folder_.path() / "python").string();
  EXPECT_EQ(Failure(),
            python + " has no pip: install it (Debian: python3-pip), or name a Python that has it in PHSA_PYTHON");
  fs::remove(python);
  EXPECT_EQ(Failure(), python +
                           ": cannot be started: No such file or directory: install Python 3 with pip (Debian: "
                           "python3-pip), or name one in PHSA_PYTHON");
}

TEST_F(Fetch, AModelLargerThanTheDiskIsRefusedBeforeAnythingIsFetched) {
  model_.bytes = uint64_t{1} << 60;
  EXPECT_NE(Failure().find("tiny needs 1099511627"), std::string::npos);
  EXPECT_EQ(Calls(), "");
}

TEST_F(Fetch, TwoAtOnceFetchOnce) {
  StandIn("sleep 0.3\n" + std::string(kCopy));
  fs::path first, second;
  std::thread other([&] { first = Run(); });
  second = Run();
  other.join();
  EXPECT_EQ(first, second);
  EXPECT_EQ(ReadAll(first), whole_);
  EXPECT_EQ(Calls(), "tiny-part1==1.0\ntiny-part2==1.0\ntiny-part3==1.0\n");
}

TEST_F(Fetch, RemovingFreesTheModelAndWhatAFetchLeft) {
  EXPECT_EQ(RemoveModel(model_), 0u);
  Run();
  std::ofstream(StoreFilesOf(model_).partial) << "12345";
  EXPECT_EQ(RemoveModel(model_), whole_.size() + 5);
  EXPECT_TRUE(fs::is_empty(folder_.path() / "cache" / "models"));
  const StoreLock held(StoreFilesOf(model_).lock, [] {});
  EXPECT_THROW(RemoveModel(model_), Error);
}

TEST(PackagedModels, ThePartsMakeUpTheFile) {
  ASSERT_EQ(PackagedModels().size(), 3u);
  for (const PackagedModel& model : PackagedModels()) {
    uint64_t bytes = 0;
    for (const ModelPart& part : model.parts) {
      bytes += part.bytes;
      EXPECT_EQ(part.sha256.size(), 64u);
      EXPECT_GT(part.wheel_bytes, part.bytes / 2);
    }
    EXPECT_EQ(bytes, model.bytes);
    EXPECT_EQ(model.sha256.size(), 64u);
    EXPECT_EQ(model.sample_sha256.size(), 64u);
    EXPECT_EQ(FindPackagedModel(model.name), &model);
  }
}

TEST(PackagedModels, AFileIsKnownByItsNameAndSizeWhereverItLies) {
  const TempFolder folder;
  const PackagedModel& model = PackagedModels().front();
  const fs::path file = folder.path() / model.file;
  std::ofstream{file} << "GGUF";
  EXPECT_EQ(PackagedModelOf(file), nullptr);
  fs::resize_file(file, model.bytes);
  EXPECT_EQ(PackagedModelOf(file), &model);
  fs::rename(file, folder.path() / "other.gguf");
  EXPECT_EQ(PackagedModelOf(folder.path() / "other.gguf"), nullptr);
  EXPECT_EQ(PackagedModelOf(file), nullptr);  // there is none
}

TEST(CacheFolder, OurVariableComesBeforeTheDesktopsAndTheHome) {
  const ScopedVariable home("HOME", "/home/someone");
  const ScopedVariable desktop("XDG_CACHE_HOME", "");
  const ScopedVariable ours("PHSA_CACHE", "");
  EXPECT_EQ(CacheFolder(), "/home/someone/.cache/phsa");
  setenv("XDG_CACHE_HOME", "/cache", 1);
  EXPECT_EQ(CacheFolder(), "/cache/phsa");
  setenv("PHSA_CACHE", "/models", 1);
  EXPECT_EQ(CacheFolder(), "/models");
  for (const char* name : {"HOME", "XDG_CACHE_HOME", "PHSA_CACHE"}) unsetenv(name);
  EXPECT_EQ(Refusal([] { CacheFolder(); }), "there is no HOME to keep models in: set PHSA_CACHE to a folder");
}

class Hub : public testing::Test {
 protected:
  // A link to a blob, as the cache has it.
  void Add(const std::string& path, const std::string& content) {
    static int count = 0;
    const fs::path blob = folder_.Write("blobs/" + std::to_string(count++), content);
    fs::create_directories((folder_.path() / path).parent_path());
    fs::create_symlink(blob, folder_.path() / path);
  }

  TempFolder folder_;
  ScopedVariable hub_{"HF_HUB_CACHE", folder_.path().string()};
  ScopedVariable cache_{"PHSA_CACHE", (folder_.path() / "phsa").string()};
};

TEST_F(Hub, ModelsAreFoundInTheirNewestSnapshot) {
  const std::string gguf = SmallGguf().Finish();
  Add("models--org--one/snapshots/aaa/model.gguf", gguf);
  Add("models--org--one/snapshots/bbb/model.gguf", gguf);
  folder_.Write("models--org--one/refs/main", "aaa\n");
  Add("models--org--two/snapshots/ccc/q4.gguf", gguf);
  Add("models--org--two/snapshots/ccc/q8.gguf", gguf);
  Add("models--plain/snapshots/ddd/config.json", R"({"model_type": "llama", "hidden_size": 4, "intermediate_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 3, "max_position_embeddings": 64})");
  Add("models--plain/snapshots/ddd/model.safetensors",
      Safetensors(R"({"model.embed_tokens.weight": {"dtype": "F16", "shape": [3, 4], "data_offsets": [0, 24]}})",
                  std::string(24, 'x')));
  Add("models--org--other/snapshots/eee/config.json", R"({"model_type": "bert"})");
  Add("models--org--other/snapshots/eee/model.safetensors", "");
  Add("models--org--empty/snapshots/fff/README.md", "");
  Add("datasets--org--data/snapshots/ggg/model.gguf", gguf);

  std::vector<std::string> names;
  for (const HubModel& model : HubModels()) names.push_back(model.name);
  EXPECT_EQ(names, (std::vector<std::string>{"org/one", "org/two/q4.gguf", "org/two/q8.gguf", "plain"}));
  EXPECT_EQ(ResolveModel("org/one"), folder_.path() / "models--org--one/snapshots/aaa/model.gguf");
  EXPECT_EQ(ResolveModel("org/two/q8.gguf"), folder_.path() / "models--org--two/snapshots/ccc/q8.gguf");
  EXPECT_EQ(ResolveModel("plain"), folder_.path() / "models--plain/snapshots/ddd");
  EXPECT_EQ(ModelSource::Open(ResolveModel("plain"))->config().name, "plain");  // not ddd
  // What does not open is not listed, but found, so that its own error is what the user sees.
  EXPECT_EQ(ResolveModel("org/other"), folder_.path() / "models--org--other/snapshots/eee");
}

TEST_F(Hub, AnUnknownNameIsRefusedWithTheNearestOne) {
  EXPECT_TRUE(HubModels().empty());
  EXPECT_EQ(ResolveModel(folder_.path().string()), folder_.path());
  EXPECT_EQ(Refusal([] { ResolveModel("smollm2-135m"); }),
            "smollm2-135m is not on this machine yet: run `phsa models fetch smollm2-135m` (93 MB)");
  EXPECT_EQ(
      Refusal([] { ResolveModel("smolm2-135M"); }),
      "\"smolm2-135M\": no such file or folder, and no model of that name (did you mean smollm2-135m?); `phsa models` "
      "lists those that can be had");
  EXPECT_EQ(
      Refusal([] { ResolveModel("missing.gguf"); }),
      "\"missing.gguf\": no such file or folder, and no model of that name; `phsa models` lists those that can be "
      "had");
  EXPECT_EQ(Refusal([] { ResolveModel(""); }), "no model is named: give a .gguf file, a Hugging Face folder or a name");
}

}  // namespace
}  // namespace phsa
