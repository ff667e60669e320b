// A reader of the protocol-buffers wire format: just enough for SentencePiece models.
//
// Reads untrusted bytes and never reads past their end. A malformed message ends the iteration with
// ok() false.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

namespace freshet::tokenizer {

class ProtoReader {
 public:
  explicit ProtoReader(std::string_view bytes) : bytes_(bytes) {}

  // Moves to the next field; false at the end or on an error.
  bool next() {
    if (bytes_.empty() || !ok_) return false;
    const uint64_t tag = varint();
    field_ = static_cast<uint32_t>(tag >> 3);
    value_ = 0;
    data_ = {};
    switch (tag & 7) {
      case 0:
        value_ = varint();
        break;
      case 1:
        take(8);
        break;
      case 2:
        take(varint());
        break;
      case 5:
        take(4);
        break;
      default:
        ok_ = false;
    }
    return ok_;
  }

  bool ok() const { return ok_; }
  uint32_t field() const { return field_; }
  // The value of the current field; zero or empty if its wire type differs.
  uint64_t integer() const { return value_; }
  bool boolean() const { return value_ != 0; }
  std::string_view data() const { return data_; }
  float number() const {
    float f = 0;
    if (data_.size() == sizeof f) std::memcpy(&f, data_.data(), sizeof f);
    return f;
  }

 private:
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64 && !bytes_.empty(); shift += 7) {
      const auto byte = static_cast<uint8_t>(bytes_[0]);
      bytes_.remove_prefix(1);
      value |= uint64_t{byte & 0x7Fu} << shift;
      if (byte < 0x80) return value;
    }
    ok_ = false;
    return 0;
  }
  void take(uint64_t size) {
    if (!ok_ || size > bytes_.size()) {
      ok_ = false;
      return;
    }
    data_ = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
  }

  std::string_view bytes_;
  bool ok_ = true;
  uint32_t field_ = 0;
  uint64_t value_ = 0;
  std::string_view data_;
};

}  // namespace freshet::tokenizer
