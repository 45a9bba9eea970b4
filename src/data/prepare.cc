#include "data/prepare.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "base/errors.h"
#include "data/json_line.h"
#include "data/overlap.h"
#include "io/sha256.h"
#include "tokenizer/bpe.h"
#include "tokenizer/utf8_scan.h"

namespace phsa {
namespace {

// What may be read ahead of the writer, for each thread that tokenizes: some batches. One document may exceed it.
constexpr size_t kBytesAhead = 4 << 20;

// Texts on the way from the reader to the writer.
struct Job {
  DocumentBatch batch;
  size_t bytes = 0;  // of the batch, which is dropped when it was tokenized

  struct Document {
    size_t source;
    size_t tokens;  // behind those of the documents before it
    bool held_out;
  };
  std::vector<Document> documents;
  std::vector<int32_t> tokens;
  uint64_t text_bytes = 0, empty = 0, overlapping = 0;
  std::exception_ptr error;
  bool done = false;
};

// Equal for equal texts, and spread evenly over 0 to 1.
double Place(std::string_view text) {
  Sha256 sum;
  sum.Update(text.data(), text.size());
  return static_cast<double>(std::stoull(sum.Hex().substr(0, 12), nullptr, 16)) /
         static_cast<double>(uint64_t{1} << 48);
}

// What a document says. It is in the batch, or in `storage`.
std::string_view TextOf(const DocumentReader& reader, const DocumentBatch& batch,
                        const DocumentBatch::Document& document, const std::string& field, std::string* storage) {
  const std::string_view text = std::string_view(batch.text).substr(document.begin, document.size);
  if (document.line > 0) return *storage = TextOfJsonLine(text, field, reader.Where(document));
  if (const size_t bad = FirstInvalidUtf8(text); bad < text.size()) {
    const auto line = 1 + std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(bad), '\n');
    ThrowInvalid("{}: line {} is not UTF-8: byte {} of the text is 0x{:02x}; convert it first", reader.Where(document),
                 line, bad, static_cast<uint8_t>(text[bad]));
  }
  return text;
}

OverlapFinder ReadWithout(const PrepareOptions& options) {
  OverlapFinder finder;
  DocumentReader reader(options.without, TextFormat::kAuto);
  for (DocumentBatch batch; reader.Next(&batch);) {
    for (const DocumentBatch::Document& document : batch.documents) {
      std::string storage;
      finder.Add(TextOf(reader, batch, document, options.field, &storage));
    }
  }
  return finder;
}

class Pipeline {
 public:
  Pipeline(const Tokenizer& tokenizer, DocumentReader& reader, const PrepareOptions& options)
      : tokenizer_(&tokenizer),
        reader_(&reader),
        options_(&options),
        without_(ReadWithout(options)),
        budget_(kBytesAhead * static_cast<size_t>(options.threads)) {
    try {
      threads_.emplace_back([this] { Read(); });
      for (int32_t i = 0; i < options.threads; ++i) threads_.emplace_back([this] { Work(); });
    } catch (...) {
      Stop();
      throw;
    }
  }
  ~Pipeline() { Stop(); }
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  // The next one in the order of the files, done; null: there are no more. Throws what reading or tokenizing it threw.
  std::unique_ptr<Job> Next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return jobs_.empty() ? all_read_ : jobs_.front()->done; });
    if (jobs_.empty()) return nullptr;
    std::unique_ptr<Job> job = std::move(jobs_.front());
    jobs_.pop_front();
    bytes_ahead_ -= job->bytes;
    if (next_ > 0) --next_;
    changed_.notify_all();
    if (job->error) std::rethrow_exception(job->error);
    return job;
  }

 private:
  void Read() {
    for (;;) {
      auto job = std::make_unique<Job>();
      bool more = true;
      try {
        more = reader_->Next(&job->batch);
        job->bytes = job->batch.text.size();
      } catch (...) {
        // It takes its turn, so that what is wrong before it is told first.
        job->error = std::current_exception();
        job->done = true;
      }
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stop_ || jobs_.empty() || bytes_ahead_ + job->bytes <= budget_; });
      all_read_ = stop_ || !more || job->error;
      bytes_ahead_ += job->bytes;
      if (more) jobs_.push_back(std::move(job));
      changed_.notify_all();
      if (all_read_) return;
    }
  }

  void Work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stop_ || next_ < jobs_.size() || all_read_; });
      if (stop_ || next_ == jobs_.size()) return;
      Job* const job = jobs_[next_++].get();
      if (job->done) continue;  // an error of the reader
      lock.unlock();
      try {
        Tokenize(job);
      } catch (...) {
        job->error = std::current_exception();
      }
      job->batch.text = {};
      lock.lock();
      job->done = true;
      changed_.notify_all();
    }
  }

  void Tokenize(Job* job) const {
    for (const DocumentBatch::Document& document : job->batch.documents) {
      std::string storage;
      const std::string_view text = TextOf(*reader_, job->batch, document, options_->field, &storage);
      if (!without_.empty() && without_.Overlaps(text)) {
        ++job->overlapping;
        continue;
      }
      // Whatever is spelled in a text, it cannot become a token that ends one.
      const std::vector<int32_t> ids = tokenizer_->Encode(text, SpecialTokens::kAsText);
      if (ids.empty()) {
        ++job->empty;
        continue;
      }
      const bool held_out = options_->held_out_share > 0 && Place(text) < options_->held_out_share;
      job->documents.push_back({document.source, ids.size(), held_out});
      job->tokens.insert(job->tokens.end(), ids.begin(), ids.end());
      job->text_bytes += text.size();
    }
  }

  void Stop() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  const Tokenizer* tokenizer_;
  DocumentReader* reader_;
  const PrepareOptions* options_;
  const OverlapFinder without_;
  const size_t budget_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<Job>> jobs_;  // in order; those before next_ were taken by a thread
  size_t next_ = 0;
  size_t bytes_ahead_ = 0;
  bool all_read_ = false, stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

PrepareResult PrepareTokens(const Tokenizer& tokenizer, DocumentReader& reader, const PrepareOptions& options,
                            TokenFolder& train, TokenFolder* held_out,
                            const std::function<void(const PrepareProgress&)>& progress) {
  PrepareResult result;
  uint64_t tokens = 0;
  Pipeline pipeline(tokenizer, reader, options);
  while (const std::unique_ptr<Job> job = pipeline.Next()) {
    std::span<const int32_t> rest(job->tokens);
    for (const Job::Document& document : job->documents) {
      TokenFolder& folder = document.held_out && held_out != nullptr ? *held_out : train;
      folder.Add(rest.first(document.tokens), document.source);
      rest = rest.subspan(document.tokens);
    }
    result.documents += job->documents.size();
    result.empty += job->empty;
    result.overlapping += job->overlapping;
    result.text_bytes += job->text_bytes;
    tokens += job->tokens.size();
    progress({job->batch.position, reader.total_bytes(), tokens});
  }
  return result;
}

std::string TokenizerSha256(const Tokenizer& tokenizer) {
  Sha256 sum;
  const auto add = [&](int32_t number) { sum.Update(&number, sizeof(number)); };
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    const std::string_view bytes = tokenizer.TokenBytes(id);
    add(static_cast<int32_t>(bytes.size()));
    sum.Update(bytes.data(), bytes.size());
  }
  for (const BpeMerge& merge : tokenizer.merges()) {
    add(merge.left);
    add(merge.right);
    add(merge.result);
  }
  for (const double score : tokenizer.scores()) sum.Update(&score, sizeof(score));
  return sum.Hex();
}

int32_t EndOfText(const Tokenizer& tokenizer) {
  // A chat model's end token ends a turn; a text ends with what its base model was trained on: GPT-2 and most others,
  // Llama 3, DeepSeek.
  for (const char* name : {"<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>"}) {
    if (const int32_t id = tokenizer.TokenId(name); id >= 0 && tokenizer.IsSpecial(id)) return id;
  }
  return tokenizer.eos();
}

}  // namespace phsa
