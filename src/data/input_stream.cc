#include "data/input_stream.h"

#include <fcntl.h>
#include <lzma.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <string_view>

#include "base/errors.h"

namespace phsa {
namespace {

constexpr size_t kBufferBytes = 256 << 10;
// What a file may ask its decoder to hold. `xz -9` needs 65 MiB, `zstd --long` 128 MiB.
constexpr uint64_t kDecoderBytes = uint64_t{256} << 20;
constexpr int kZstdWindowLog = 28;

}  // namespace

class InputStream::Decoder {
 public:
  enum class State : uint8_t { kGoesOn, kEnded, kCorrupt, kTooMuchMemory };
  struct Buffers {
    const uint8_t* in;
    size_t in_size;
    uint8_t* out;
    size_t out_size;
  };
  virtual ~Decoder() = default;
  // Moves on in both. `last`: no input comes after this. kEnded: the file may end here, or more may come. With no
  // progress and kGoesOn at the last input, the file was cut.
  virtual State Step(Buffers* buffers, bool last) = 0;
};

namespace {

using State = InputStream::Decoder::State;
using Buffers = InputStream::Decoder::Buffers;

class PlainDecoder final : public InputStream::Decoder {
 public:
  State Step(Buffers* buffers, bool /*last*/) override {
    const size_t count = std::min(buffers->in_size, buffers->out_size);
    std::memcpy(buffers->out, buffers->in, count);
    *buffers = {buffers->in + count, buffers->in_size - count, buffers->out + count, buffers->out_size - count};
    return State::kEnded;
  }
};

class XzDecoder final : public InputStream::Decoder {
 public:
  XzDecoder() {
    // Concatenated: what `cat` makes of two files is a file, as for xz itself.
    if (lzma_stream_decoder(&stream_, kDecoderBytes, LZMA_CONCATENATED) != LZMA_OK) throw std::bad_alloc();
  }
  ~XzDecoder() override { lzma_end(&stream_); }
  XzDecoder(const XzDecoder&) = delete;
  XzDecoder& operator=(const XzDecoder&) = delete;

  State Step(Buffers* buffers, bool last) override {
    stream_.next_in = buffers->in;
    stream_.avail_in = buffers->in_size;
    stream_.next_out = buffers->out;
    stream_.avail_out = buffers->out_size;
    const lzma_ret result = lzma_code(&stream_, last ? LZMA_FINISH : LZMA_RUN);
    *buffers = {stream_.next_in, stream_.avail_in, stream_.next_out, stream_.avail_out};
    switch (result) {
      case LZMA_OK:
      case LZMA_BUF_ERROR:  // no progress: the input is not enough
        return State::kGoesOn;
      case LZMA_STREAM_END: return State::kEnded;
      case LZMA_MEMLIMIT_ERROR: return State::kTooMuchMemory;
      case LZMA_MEM_ERROR: throw std::bad_alloc();
      default: return State::kCorrupt;
    }
  }

 private:
  lzma_stream stream_ = LZMA_STREAM_INIT;
};

class GzipDecoder final : public InputStream::Decoder {
 public:
  GzipDecoder() {
    constexpr int kGzipOnly = 16;
    if (inflateInit2(&stream_, MAX_WBITS + kGzipOnly) != Z_OK) throw std::bad_alloc();
  }
  ~GzipDecoder() override { inflateEnd(&stream_); }
  GzipDecoder(const GzipDecoder&) = delete;
  GzipDecoder& operator=(const GzipDecoder&) = delete;

  State Step(Buffers* buffers, bool /*last*/) override {
    if (ended_) {
      if (buffers->in_size == 0) return State::kEnded;
      // Another member: such files are made by appending.
      PHSA_CHECK(inflateReset(&stream_) == Z_OK);
      ended_ = false;
    }
    constexpr size_t kAtOnce = 1 << 30;  // zlib counts in 32 bits
    const size_t in_size = std::min(buffers->in_size, kAtOnce), out_size = std::min(buffers->out_size, kAtOnce);
    stream_.next_in = const_cast<Bytef*>(buffers->in);
    stream_.avail_in = static_cast<uInt>(in_size);
    stream_.next_out = buffers->out;
    stream_.avail_out = static_cast<uInt>(out_size);
    const int result = inflate(&stream_, Z_NO_FLUSH);
    const size_t taken = in_size - stream_.avail_in, given = out_size - stream_.avail_out;
    *buffers = {buffers->in + taken, buffers->in_size - taken, buffers->out + given, buffers->out_size - given};
    if (result == Z_MEM_ERROR) throw std::bad_alloc();
    ended_ = result == Z_STREAM_END;
    if (ended_) return State::kEnded;
    return result == Z_OK || result == Z_BUF_ERROR ? State::kGoesOn : State::kCorrupt;
  }

 private:
  z_stream stream_{};
  bool ended_ = false;
};

class ZstdDecoder final : public InputStream::Decoder {
 public:
  ZstdDecoder() : context_(ZSTD_createDCtx()) {
    if (context_ == nullptr) throw std::bad_alloc();
    PHSA_CHECK(!ZSTD_isError(ZSTD_DCtx_setParameter(context_, ZSTD_d_windowLogMax, kZstdWindowLog)));
  }
  ~ZstdDecoder() override { ZSTD_freeDCtx(context_); }
  ZstdDecoder(const ZstdDecoder&) = delete;
  ZstdDecoder& operator=(const ZstdDecoder&) = delete;

  State Step(Buffers* buffers, bool /*last*/) override {
    // After a frame, no input means no new one.
    if (ended_ && buffers->in_size == 0) return State::kEnded;
    ZSTD_inBuffer in = {buffers->in, buffers->in_size, 0};
    ZSTD_outBuffer out = {buffers->out, buffers->out_size, 0};
    const size_t result = ZSTD_decompressStream(context_, &out, &in);
    *buffers = {buffers->in + in.pos, buffers->in_size - in.pos, buffers->out + out.pos, buffers->out_size - out.pos};
    if (ZSTD_isError(result)) {
      const std::string_view reason = ZSTD_getErrorName(result);
      if (reason.find("memory for decoding") != std::string_view::npos) return State::kTooMuchMemory;
      if (reason.find("Allocation") != std::string_view::npos) throw std::bad_alloc();
      return State::kCorrupt;
    }
    ended_ = result == 0;
    return ended_ ? State::kEnded : State::kGoesOn;
  }

 private:
  ZSTD_DCtx* context_;
  bool ended_ = false;
};

std::unique_ptr<InputStream::Decoder> DecoderFor(std::string_view start) {
  using std::string_view_literals::operator""sv;
  if (start.substr(0, 6) == "\xfd\x37zXZ\0"sv) return std::make_unique<XzDecoder>();
  if (start.substr(0, 2) == "\x1f\x8b"sv) return std::make_unique<GzipDecoder>();
  const bool skippable_frame = start.size() >= 4 && (start[0] & 0xf0) == 0x50 && start.substr(1, 3) == "\x2a\x4d\x18"sv;
  if (start.substr(0, 4) == "\x28\xb5\x2f\xfd"sv || skippable_frame) return std::make_unique<ZstdDecoder>();
  return std::make_unique<PlainDecoder>();
}

}  // namespace

InputStream::InputStream(const std::string& path)
    : name_(path == "-" ? "standard input" : path),
      descriptor_(path == "-" ? STDIN_FILENO : open(path.c_str(), O_RDONLY | O_CLOEXEC)),
      buffer_(kBufferBytes) {
  if (descriptor_ < 0) ThrowInvalid("{}: cannot be read: {}", name_, std::strerror(errno));
  constexpr size_t kLongestMark = 6;
  while (end_ < kLongestMark && Fill()) {
  }
  decoder_ = DecoderFor({reinterpret_cast<const char*>(buffer_.data()), end_});
}

InputStream::~InputStream() {
  if (descriptor_ > STDIN_FILENO) close(descriptor_);
}

bool InputStream::Fill() {
  for (;;) {
    const ssize_t count = read(descriptor_, buffer_.data() + end_, buffer_.size() - end_);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) Throw(PHSA_IO, "{}: cannot be read: {}", name_, std::strerror(errno));
    end_ += static_cast<size_t>(count);
    position_ += static_cast<uint64_t>(count);
    return count > 0;
  }
}

size_t InputStream::Read(char* out, size_t size) {
  for (bool last = false;;) {
    if (begin_ == end_ && !last) {
      begin_ = end_ = 0;
      last = !Fill();
    }
    Buffers buffers = {buffer_.data() + begin_, end_ - begin_, reinterpret_cast<uint8_t*>(out), size};
    const State state = decoder_->Step(&buffers, last);
    const size_t taken = end_ - begin_ - buffers.in_size, given = size - buffers.out_size;
    begin_ += taken;
    const uint64_t place = position_ - buffers.in_size;
    if (state == State::kCorrupt) {
      ThrowInvalid("{}: is corrupt near byte {} of the compressed file; make or fetch it again", name_, place);
    }
    if (state == State::kTooMuchMemory) {
      Throw(PHSA_UNSUPPORTED, "{}: was compressed with a window that needs more than {} MiB; compress it with less",
            name_, kDecoderBytes >> 20);
    }
    if (given > 0) return given;
    if (!last) continue;
    if (state == State::kEnded) return 0;
    if (taken == 0) ThrowInvalid("{}: is cut: it ends at byte {}, in the middle of the compressed data", name_, place);
  }
}

}  // namespace phsa
