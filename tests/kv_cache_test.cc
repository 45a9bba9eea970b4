#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>

#include "base/new_file.h"
#include "fake_model.h"
#include "model/decoder.h"
#include "model/kv_file.h"
#include "refusal.h"
#include "test_backend.h"

namespace phsa {
namespace {

namespace fs = std::filesystem;

LayerSettings Sparse() {
  LayerSettings settings;
  settings.base.init_tokens = 16;
  settings.base.local_tokens = 32;
  settings.base.top_k = 3;
  return settings;
}

// A small model with a cache of eight pages, and a folder of its own.
class Cache : public testing::Test {
 protected:
  explicit Cache(int32_t kv_type = PHSA_F32)
      : threads(1),
        backend(TestBackend(model, WeightsMode::kF32, kv_type, 1024, threads)),
        cache(TestCache(*backend, PageLayout(model.config(), Sparse(), kv_type), 8)),
        decoder(model.config(), *backend, Sparse(), threads) {
    std::vector<uint8_t> flags(101);
    for (size_t i = 0; i < 20; ++i) flags[i] = 1;
    decoder.SetPunctuation(flags);
    fs::create_directories(folder);
  }
  ~Cache() override { fs::remove_all(folder); }

  // The logits of the last token.
  std::vector<float> Read(Sequence& sequence, std::span<const int32_t> tokens) {
    std::vector<float> out;
    const BatchItem item{&sequence, tokens, BatchItem::Logits::kLast};
    decoder.Step({&item, 1}, [&](int32_t, int32_t, const LogitsRow& logits) {
      out.assign(logits.All().begin(), logits.All().end());
    });
    return out;
  }

  std::string FileText(const fs::path& path) {
    std::ifstream stream(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
  }

  void GoesOnFromAFile() {
    const std::vector<int32_t> text = Tokens(333), more = Tokens(20, 7);
    Sequence one(cache);
    Read(one, text);
    SaveSequence(one, identity, file);
    EXPECT_EQ(std::distance(fs::directory_iterator(folder), fs::directory_iterator()), 1) << "no half file is left";
    const std::vector<float> expected = Read(one, more);
    one.Truncate(0);
    // Pages are taken in another order, and hold another text's leftovers.
    Sequence filler(cache);
    Read(filler, Tokens(500, 9));
    filler.Truncate(130);
    Sequence restored(cache);
    RestoreSequence(restored, identity, text, file);
    EXPECT_EQ(restored.tokens(), text);
    EXPECT_TRUE(SameBits(Read(restored, more), expected));
  }

  void FilesHaveNothingOfOtherTexts() {
    Sequence one(cache);
    Read(one, Tokens(100, 4));
    SaveSequence(one, identity, file);
    const std::string clean = FileText(file);
    one.Truncate(0);
    Read(one, Tokens(128, 8));
    one.Truncate(0);
    Read(one, Tokens(100, 4));  // in the page that the other text has left
    SaveSequence(one, identity, file);
    EXPECT_EQ(FileText(file), clean);
  }

  const fs::path folder = fs::temp_directory_path() / ("phsa_kv_cache_test_" + std::to_string(getpid()));
  const fs::path file = folder / "cache";
  const KvIdentity identity = {{"model", "a"}, {"attention", "b"}};
  FakeModel model;
  ThreadPool threads;
  std::unique_ptr<ModelBackend> backend;
  KvCache cache;
  Decoder decoder;
};

// The same with 8-bit keys and values, whose scales are parts of the pages too.
class CacheOfCodes : public Cache {
 protected:
  CacheOfCodes() : Cache(PHSA_INT8) {}
};

// What is refused, in words that help.
void ExpectRefusal(const std::function<void()>& work, const std::vector<std::string>& words) {
  const std::string message = Refusal(work);
  for (const std::string& word : words) EXPECT_NE(message.find(word), std::string::npos) << message;
}

TEST_F(Cache, AForkGoesItsOwnWayAndLeavesTheOtherAlone) {
  const std::vector<int32_t> text = Tokens(200), left = Tokens(150, 2), right = Tokens(40, 3);
  std::vector<float> expected_left, expected_right;
  {
    Sequence one(cache), two(cache);
    Read(one, text);
    expected_left = Read(one, left);
    Read(two, text);
    expected_right = Read(two, right);
  }
  Sequence one(cache);
  Read(one, text);
  EXPECT_EQ(cache.free_pages(), 6);
  Sequence two = one.Fork();
  EXPECT_EQ(cache.free_pages(), 6) << "a fork alone takes nothing";
  EXPECT_EQ(two.tokens(), one.tokens());
  EXPECT_TRUE(SameBits(Read(two, right), expected_right));
  EXPECT_EQ(cache.free_pages(), 5) << "the page that both write into is copied, the full one is not";
  EXPECT_TRUE(SameBits(Read(one, left), expected_left));
  EXPECT_EQ(one.pages().front(), two.pages().front());
  one.Truncate(0);
  EXPECT_TRUE(SameBits(Read(two, left),
                       [&] {
                         Sequence three(cache);
                         Read(three, text);
                         Read(three, right);
                         return Read(three, left);
                       }()))
      << "what one gives back, the other still has";
}

TEST_F(Cache, TruncatingAForkDoesNotDisturbTheOther) {
  const std::vector<int32_t> text = Tokens(256), other = Tokens(100, 5);
  Sequence one(cache);
  Read(one, text);
  Sequence two = one.Fork();
  two.Truncate(70);  // into a full page that is shared
  Read(two, other);
  Sequence fresh(cache);
  Read(fresh, text);
  EXPECT_TRUE(SameBits(Read(one, other), Read(fresh, other)));
}

TEST_F(Cache, TextsThatPartAtTheEndOfAPageKeepTheirOwnRepresentatives) {
  // infllm2-64's last representative of a page covers the first 16 tokens of the next one.
  LayerSettings settings;
  settings.base.policy = Policy::kInfllm2_64;
  settings.base.block_size = settings.base.init_tokens = settings.base.local_tokens = 64;
  settings.base.top_k = 1;
  KvCache pooled = TestCache(*backend, PageLayout(model.config(), settings, PHSA_F32), 32);
  Decoder reader(model.config(), *backend, settings, threads);
  const auto read = [&](Sequence& sequence, std::span<const int32_t> tokens) {
    std::vector<float> out;
    const BatchItem item{&sequence, tokens, BatchItem::Logits::kAll};
    reader.Step({&item, 1}, [&](int32_t, int32_t, const LogitsRow& logits) {
      out.insert(out.end(), logits.All().begin(), logits.All().end());
    });
    return out;
  };
  for (const size_t shared : {128, 133, 143, 144, 256}) {
    const std::vector<int32_t> text = Tokens(shared);
    const std::vector<int32_t> left[] = {Tokens(9, 2), Tokens(300, 3)}, right[] = {Tokens(20, 4), Tokens(300, 5)};
    const auto alone = [&](const std::vector<int32_t>(&parts)[2]) {
      Sequence sequence(pooled);
      read(sequence, text);
      read(sequence, parts[0]);
      return read(sequence, parts[1]);
    };
    Sequence one(pooled);
    read(one, text);
    Sequence two = one.Fork();
    const size_t needed = one.PagesToAppend(9);
    const int32_t free = pooled.free_pages();
    read(one, left[0]);
    EXPECT_EQ(static_cast<size_t>(free - pooled.free_pages()), needed);
    read(two, right[0]);
    EXPECT_TRUE(SameBits(read(one, left[1]), alone(left))) << shared;
    EXPECT_TRUE(SameBits(read(two, right[1]), alone(right))) << shared;
  }
}

TEST_F(Cache, PagesComeBackWhenTheLastOwnerIsGone) {
  {
    Sequence one(cache);
    Read(one, Tokens(300));
    Sequence two = one.Fork();
    Sequence three = std::move(two);
    EXPECT_EQ(two.length(), 0);  // NOLINT: what is left behind is an empty text, by its definition
    one = three.Fork();
    EXPECT_EQ(cache.free_pages(), 5);
  }
  EXPECT_EQ(cache.free_pages(), 8);
}

TEST_F(Cache, AForkThatDoesNotFitIsRefusedAndUnchanged) {
  Sequence one(cache);
  Read(one, Tokens(8 * kPageTokens - 10));
  Sequence two = one.Fork();
  ExpectRefusal([&] { Read(two, Tokens(1)); }, {"KV cache", "room for 0"});
  EXPECT_EQ(two.length(), 8 * kPageTokens - 10);
  two.Truncate(0);
  Read(one, Tokens(10));  // alone it need not copy
}

TEST_F(Cache, ARestoredTextGoesOnAsIfItHadJustBeenRead) { GoesOnFromAFile(); }
TEST_F(CacheOfCodes, ARestoredTextGoesOnAsIfItHadJustBeenRead) { GoesOnFromAFile(); }

TEST_F(Cache, OnlyTheCommonBeginningIsRestored) {
  const std::vector<int32_t> text = Tokens(300), more = Tokens(20, 7);
  Sequence one(cache);
  Read(one, text);
  SaveSequence(one, identity, file);
  std::vector<int32_t> wanted = text;
  wanted[217] = (wanted[217] + 1) % 101;
  one.Truncate(217);
  Sequence restored(cache);
  RestoreSequence(restored, identity, wanted, file);
  EXPECT_EQ(restored.length(), 217);
  EXPECT_TRUE(SameBits(Read(restored, more), Read(one, more)));
}

TEST_F(Cache, AFileHasNothingOfOtherTexts) { FilesHaveNothingOfOtherTexts(); }
TEST_F(CacheOfCodes, AFileHasNothingOfOtherTexts) { FilesHaveNothingOfOtherTexts(); }

TEST_F(Cache, AFileOfSomethingElseIsRefusedNamingWhat) {
  const std::vector<int32_t> text = Tokens(100);
  Sequence one(cache);
  Read(one, text);
  SaveSequence(one, identity, file);
  Sequence two(cache);
  ExpectRefusal(
      [&] {
        RestoreSequence(two, {{"model", "a"}, {"attention", "c"}}, text, file);
      },
      {"another attention", "\"b\"", "\"c\""});
  KvCache half = TestCache(*backend, PageLayout(model.config(), Sparse(), PHSA_BF16), 8);
  Sequence three(half);
  ExpectRefusal([&] { RestoreSequence(three, identity, text, file); }, {"another layout", "f32", "bf16"});
  KvCache codes = TestCache(*backend, PageLayout(model.config(), Sparse(), PHSA_INT8), 8);
  Sequence four(codes);
  ExpectRefusal([&] { RestoreSequence(four, identity, text, file); }, {"another layout", "f32", "int8"});
  EXPECT_THROW(RestoreSequence(two, identity, text, folder / "none"), Error);
  std::ofstream(folder / "text") << "some text";
  ExpectRefusal([&] { RestoreSequence(two, identity, text, folder / "text"); }, {"not a KV cache"});
  EXPECT_EQ(two.length(), 0);
}

TEST_F(Cache, ADamagedFileIsRefusedWhereverItIsCutOrChanged) {
  const std::vector<int32_t> text = Tokens(200);
  Sequence one(cache);
  Read(one, text);
  SaveSequence(one, identity, file);
  const std::string whole = FileText(file);
  const size_t header = whole.find("\n\n") + 2;
  Sequence two(cache);
  const auto expect_refusal = [&](const std::string& contents) {
    std::ofstream(folder / "bad", std::ios::binary) << contents;
    EXPECT_THROW(RestoreSequence(two, identity, text, folder / "bad"), Error);
    EXPECT_EQ(two.length(), 0);
    EXPECT_EQ(cache.free_pages(), 6);
  };
  for (const size_t size : {size_t{0}, size_t{5}, header / 2, header - 1, header, header + 3, header + 900,
                            whole.size() / 2, whole.size() - 1}) {
    expect_refusal(whole.substr(0, size));
  }
  for (size_t at = 0; at < whole.size(); at += at < header + 20 ? 1 : whole.size() / 50) {
    std::string changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ 1);
    expect_refusal(changed);
  }
  expect_refusal(whole + "x");
  for (const char* tokens : {"18446744073709551615", "4611686018427387904", "-1", "", "99999999999999999999999"}) {
    std::string changed = whole;
    changed.replace(changed.find("tokens: 200"), 11, std::string("tokens: ") + tokens);
    expect_refusal(changed);
  }
}

TEST_F(Cache, KeysThatAreNotNumbersDoNoHarm) {
  // A file with a right checksum can still hold anything.
  const std::vector<int32_t> text = Tokens(400);
  Sequence one(cache);
  Read(one, text);
  for (const int32_t page : one.pages()) {
    std::vector<float> values((cache.layout().page_bytes - kPageTokens) / sizeof(float));
    const std::span bytes(reinterpret_cast<uint8_t*>(values.data()), values.size() * sizeof(float));
    cache.memory().Read(page, kPageTokens, bytes);
    for (size_t i = 0; i < values.size(); i += 3) {
      values[i] = i % 2 == 0 ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
    }
    cache.memory().Write(page, kPageTokens, bytes);
  }
  EXPECT_EQ(Read(one, Tokens(100, 2)).size(), 101u);
  for (int i = 0; i < 20; ++i) Read(one, Tokens(1, 3));
}

TEST_F(Cache, TheIdentityTellsModelsApart) {
  FakeModel other;
  EXPECT_EQ(ModelIdentity(model), ModelIdentity(other));
  other.Add("model.norm.weight", {64});
  EXPECT_NE(ModelIdentity(model), ModelIdentity(other));
}

TEST_F(Cache, TheIdentitySeesATensorsMiddleAndEnd) {
  FakeModel one, other;
  for (FakeModel* each : {&one, &other}) each->Add("lm_head.weight", {1024, 512});  // 2 MB: in parts
  EXPECT_EQ(ModelIdentity(one), ModelIdentity(other));
  const Tensor& tensor = *other.Find("lm_head.weight");
  auto* const data = const_cast<uint8_t*>(tensor.data);
  for (const size_t at : {size_t{0}, (tensor.bytes - 4096) / 15 * 7 + 100, tensor.bytes - 1}) {
    data[at] ^= 1;
    EXPECT_NE(ModelIdentity(one), ModelIdentity(other)) << at;
    data[at] ^= 1;
  }
}

TEST_F(Cache, ANewFileAppearsWholeOrNotAtAll) {
  std::ofstream(file) << "before";
  {
    NewFile half(file);
    half.Write("after");
  }
  EXPECT_EQ(FileText(file), "before");
  NewFile whole(file);
  whole.Write("after");
  whole.Keep();
  EXPECT_EQ(FileText(file), "after");
  EXPECT_THROW(NewFile(folder / "none" / "file"), Error);
  EXPECT_THROW(NewFile{folder}, Error);
  EXPECT_THROW(NewFile{"/dev/null"}, Error);
  if (fs::exists("/dev/full")) {
    // A full disk: the device takes nothing.
    fs::create_symlink("/dev/full", folder / ("full." + std::to_string(getpid()) + ".part"));
    NewFile full(folder / "full");
    EXPECT_THROW(full.Write("x"), Error);
  }
}

}  // namespace
}  // namespace phsa
