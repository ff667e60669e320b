#include "tokenizer/decoder.h"

#include <algorithm>

#include "tokenizer/unicode.h"

namespace freshet::tokenizer {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

std::string replace_all(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  size_t done = 0;
  if (!from.empty()) {
    for (size_t at = text.find(from); at != std::string_view::npos; at = text.find(from, done)) {
      out += text.substr(done, at - done);
      out += to;
      done = at + from.size();
    }
  }
  out += text.substr(done);
  return out;
}

std::string apply_replace(const DecoderStep& step, std::string_view text) {
  if (step.regex == nullptr) return replace_all(text, step.text, step.content);
  std::string out;
  size_t done = 0;
  step.regex->for_each_match(text, [&](size_t begin, size_t end) {
    out += text.substr(done, begin - done);
    out += step.content;
    done = end;
  });
  out += text.substr(done);
  return out;
}

// Rejoins text that English tokenizers split.
std::string clean_up(std::string text) {
  constexpr std::pair<std::string_view, std::string_view> kRules[] = {
      {" .", "."},   {" ?", "?"},     {" !", "!"},    {" ,", ","},
      {" ' ", "'"},  {" n't", "n't"}, {" 'm", "'m"},  {" do not", " don't"},
      {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"}};
  for (const auto& [from, to] : kRules) text = replace_all(text, from, to);
  return text;
}

std::string byte_level(std::string_view token) {
  std::string bytes;
  return printable_to_bytes(token, bytes) ? bytes : std::string(token);
}

// One step of a running stream. `next` is the rest of the chain.
class Stage {
 public:
  virtual ~Stage() = default;
  virtual void push(std::string_view token) = 0;
  virtual void finish() = 0;
  void set_next(Stage* next) { next_ = next; }

 protected:
  Stage& next() { return *next_; }

 private:
  Stage* next_ = nullptr;
};

class OutputStage : public Stage {
 public:
  void set_output(std::string* out) { out_ = out; }
  void push(std::string_view token) override { out_->append(token); }
  void finish() override {}

 private:
  std::string* out_ = nullptr;
};

// A step that processes each token by itself and knows whether it is the first.
class EachStage : public Stage {
 public:
  explicit EachStage(const DecoderStep& step) : step_(step) {}
  void push(std::string_view token) override {
    next().push(apply(token));
    first_ = false;
  }
  void finish() override { next().finish(); }

 private:
  std::string apply(std::string_view token) const {
    using Kind = DecoderStep::Kind;
    switch (step_.kind) {
      case Kind::kMetaspace:
        return replace_all(token, step_.text, first_ && step_.flag ? "" : " ");
      case Kind::kWordPiece: {
        std::string out;
        if (!first_ && token.starts_with(step_.text)) {
          token.remove_prefix(step_.text.size());
        } else if (!first_) {
          out = " ";
        }
        out += token;
        return step_.flag ? clean_up(std::move(out)) : out;
      }
      case Kind::kStrip:
        return strip(token);
      case Kind::kReplace:
        return apply_replace(step_, token);
      case Kind::kJoin:
        return fmt::format("{}{}", first_ ? "" : " ", token);
      default:
        return std::string(token);
    }
  }
  std::string strip(std::string_view token) const {
    const std::string& c = step_.text;
    for (size_t i = 0; i < step_.left && !c.empty() && token.starts_with(c); ++i) {
      token.remove_prefix(c.size());
    }
    for (size_t i = 0; i < step_.right && !c.empty() && token.ends_with(c); ++i) {
      token.remove_suffix(c.size());
    }
    return std::string(token);
  }

  const DecoderStep& step_;
  bool first_ = true;
};

class FuseStage : public Stage {
 public:
  void push(std::string_view token) override {
    if (!token.empty()) next().push(token);
  }
  void finish() override { next().finish(); }
};

// Also fuses: the next steps see a single token.
class BytesStage : public Stage {
 public:
  explicit BytesStage(bool printable) : printable_(printable) {}
  void push(std::string_view token) override {
    std::string text;
    assembler_.push(printable_ ? byte_level(token) : token, text);
    if (!text.empty()) next().push(text);
  }
  void finish() override {
    std::string text;
    assembler_.finish(text);
    if (!text.empty()) next().push(text);
    next().finish();
  }

 private:
  bool printable_;
  Utf8Assembler assembler_;
};

// A run of byte tokens is decoded as a whole: if it contains one invalid sequence, every byte
// becomes U+FFFD.
class ByteFallbackStage : public Stage {
 public:
  void push(std::string_view token) override {
    const int byte = byte_of_token(token);
    if (byte >= 0) {
      run_.push_back(static_cast<char>(byte));
      return;
    }
    end_run();
    next().push(token);
  }
  void finish() override {
    end_run();
    next().finish();
  }

 private:
  void end_run() {
    if (run_.empty()) return;
    if (find_invalid_utf8(run_) == std::string_view::npos) {
      next().push(run_);
    } else {
      for (size_t i = 0; i < run_.size(); ++i) next().push(kReplacement);
    }
    run_.clear();
  }
  std::string run_;
};

// The suffix of every token but the last becomes a space.
class BpeStage : public Stage {
 public:
  explicit BpeStage(const DecoderStep& step) : step_(step) {}
  void push(std::string_view token) override {
    if (held_) next().push(replace_all(last_, step_.text, " "));
    last_ = token;
    held_ = true;
  }
  void finish() override {
    if (held_) next().push(replace_all(last_, step_.text, ""));
    next().finish();
  }

 private:
  const DecoderStep& step_;
  std::string last_;
  bool held_ = false;
};

class CtcStage : public Stage {
 public:
  explicit CtcStage(const DecoderStep& step) : step_(step) {}
  void push(std::string_view token) override {
    if (seen_ && token == last_) return;
    seen_ = true;
    last_ = token;
    std::string text = replace_all(token, step_.text, "");
    if (step_.flag) text = replace_all(clean_up(std::move(text)), step_.content, " ");
    if (!text.empty()) next().push(text);
  }
  void finish() override { next().finish(); }

 private:
  const DecoderStep& step_;
  std::string last_;
  bool seen_ = false;
};

// Strips one token that arrives in parts.
class FusedStripStage : public Stage {
 public:
  explicit FusedStripStage(const DecoderStep& step) : step_(step), left_(step.left) {}
  void push(std::string_view part) override {
    held_ += part;
    const std::string& c = step_.text;
    std::string_view rest = held_;
    while (left_ > 0 && !c.empty()) {
      if (rest.starts_with(c)) {
        rest.remove_prefix(c.size());
        --left_;
      } else if (!rest.empty()) {
        left_ = 0;
      } else {
        break;
      }
    }
    size_t keep = 0;  // possibly the end of the token
    for (size_t i = 0; i < step_.right && !c.empty(); ++i) {
      if (!rest.substr(0, rest.size() - keep).ends_with(c)) break;
      keep += c.size();
    }
    if (rest.size() > keep) next().push(rest.substr(0, rest.size() - keep));
    held_ = std::string(rest.substr(rest.size() - keep));
  }
  void finish() override { next().finish(); }

 private:
  const DecoderStep& step_;
  size_t left_;
  std::string held_;
};

// Replaces a string in one token that arrives in parts.
class FusedReplaceStage : public Stage {
 public:
  explicit FusedReplaceStage(const DecoderStep& step) : step_(step) {}
  void push(std::string_view part) override {
    held_ += part;
    std::string out;
    size_t done = 0;
    for (size_t at = held_.find(step_.text); at != std::string::npos;
         at = held_.find(step_.text, done)) {
      out.append(held_, done, at - done);
      out += step_.content;
      done = at + step_.text.size();
    }
    size_t keep = std::min(step_.text.size() - 1, held_.size() - done);
    while (keep > 0 &&
           !step_.text.starts_with(std::string_view(held_).substr(held_.size() - keep))) {
      --keep;
    }
    out.append(held_, done, held_.size() - done - keep);
    held_.erase(0, held_.size() - keep);
    if (!out.empty()) next().push(out);
  }
  void finish() override {
    if (!held_.empty()) next().push(held_);
    next().finish();
  }

 private:
  const DecoderStep& step_;
  std::string held_;
};

// Collects a fused token for a step that needs all of it.
class GatherStage : public Stage {
 public:
  void push(std::string_view part) override { text_ += part; }
  void finish() override {
    if (!text_.empty()) next().push(text_);
    next().finish();
  }

 private:
  std::string text_;
};

class Chain : public DecoderStream {
 public:
  explicit Chain(const DecoderPlan& plan) {
    bool fused = false;
    for (const DecoderStep& step : plan.steps()) add(step, fused);
    auto output = std::make_unique<OutputStage>();
    output_ = output.get();
    stages_.push_back(std::move(output));
    for (size_t i = 0; i + 1 < stages_.size(); ++i) stages_[i]->set_next(stages_[i + 1].get());
  }
  void push(std::string_view token, std::string& out) override {
    output_->set_output(&out);
    stages_[0]->push(token);
  }
  void finish(std::string& out) override {
    output_->set_output(&out);
    stages_[0]->finish();
  }

 private:
  void add(const DecoderStep& step, bool& fused) {
    using Kind = DecoderStep::Kind;
    if (fused && step.kind == Kind::kStrip) {
      stages_.push_back(std::make_unique<FusedStripStage>(step));
      return;
    }
    if (fused && step.kind == Kind::kReplace && step.regex == nullptr) {
      if (!step.text.empty()) stages_.push_back(std::make_unique<FusedReplaceStage>(step));
      return;
    }
    if (fused && step.kind != Kind::kFuse) {
      stages_.push_back(std::make_unique<GatherStage>());
      fused = false;
    }
    switch (step.kind) {
      case Kind::kByteLevel:
      case Kind::kBytes:
        stages_.push_back(std::make_unique<BytesStage>(step.kind == Kind::kByteLevel));
        fused = true;
        break;
      case Kind::kFuse:
        stages_.push_back(std::make_unique<FuseStage>());
        fused = true;
        break;
      case Kind::kByteFallback:
        stages_.push_back(std::make_unique<ByteFallbackStage>());
        break;
      case Kind::kBpe:
        stages_.push_back(std::make_unique<BpeStage>(step));
        break;
      case Kind::kCtc:
        stages_.push_back(std::make_unique<CtcStage>(step));
        break;
      default:
        stages_.push_back(std::make_unique<EachStage>(step));
        break;
    }
  }

  std::vector<std::unique_ptr<Stage>> stages_;
  OutputStage* output_ = nullptr;
};

}  // namespace

int byte_of_token(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  int value = 0;
  for (const char c : token.substr(3, 2)) {
    const int digit = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                             : -1;
    if (digit < 0) return -1;
    value = value * 16 + digit;
  }
  return value;
}

void Utf8Assembler::push(std::string_view bytes, std::string& out) {
  held_ += bytes;
  drain(out, false);
}

void Utf8Assembler::finish(std::string& out) {
  drain(out, true);
}

void Utf8Assembler::drain(std::string& out, bool final) {
  size_t i = 0;
  while (i < held_.size()) {
    const Utf8Char c = decode_utf8(std::string_view(held_).substr(i));
    if (c.valid) {
      out.append(held_, i, c.size);
    } else {
      // A proper prefix of a character at the very end may still be completed.
      const bool open = i + c.size == held_.size() && held_.size() - i < utf8_size(held_[i]) &&
                        static_cast<uint8_t>(held_[i]) >= 0xC2 &&
                        static_cast<uint8_t>(held_[i]) <= 0xF4;
      if (open && !final) break;
      if (each_byte_) {
        out += kReplacement;
        ++i;
        continue;
      }
      out += kReplacement;
    }
    i += c.size;
  }
  held_.erase(0, i);
}

std::string DecoderPlan::token_bytes(std::string_view token) const {
  using Kind = DecoderStep::Kind;
  std::string text(token);
  for (const DecoderStep& step : steps_) {
    switch (step.kind) {
      case Kind::kByteLevel:
        return byte_level(text);
      case Kind::kMetaspace:
        text = replace_all(text, step.text, " ");
        break;
      case Kind::kWordPiece:
        text =
            text.starts_with(step.text) ? text.substr(step.text.size()) : fmt::format(" {}", text);
        break;
      case Kind::kBpe:
        text = replace_all(text, step.text, " ");
        break;
      case Kind::kByteFallback:
        if (const int byte = byte_of_token(text); byte >= 0) {
          return std::string(1, static_cast<char>(byte));
        }
        break;
      case Kind::kReplace:
        text = apply_replace(step, text);
        break;
      case Kind::kCtc:
        text = replace_all(text, step.content, " ");
        break;
      case Kind::kJoin:
        text.insert(0, 1, ' ');
        break;
      case Kind::kBytes:
      case Kind::kFuse:
      case Kind::kStrip:
        break;
    }
  }
  return text;
}

std::unique_ptr<DecoderStream> make_decoder_stream(const DecoderPlan& plan) {
  return std::make_unique<Chain>(plan);
}

}  // namespace freshet::tokenizer
