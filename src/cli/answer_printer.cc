#include "cli/answer_printer.h"

#include "cli/text_width.h"

namespace freshet::cli {
namespace {

// One name for each kind of tags.
constexpr const char* kTagKinds[] = {"qwen3", "mistral", "seed_oss"};

}  // namespace

std::optional<Thinking> find_thinking(const std::string& source,
                                      const tokenizer::Tokenizer& tokenizer) {
  for (const char* kind : kTagKinds) {
    const auto tags = server::reasoning_tags_by_name(kind);
    if (!tags || source.find(tags->close) == std::string::npos) continue;
    Thinking thinking{*tags, false};
    for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
      if (tokenizer.token_bytes(id) == tags->close) thinking.special = tokenizer.is_special(id);
    }
    return thinking;
  }
  return std::nullopt;
}

AnswerPrinter::AnswerPrinter(Output& out, const TerminalLook& look, const Options& options)
    : out_(out),
      look_(look),
      show_thoughts_(options.show_thoughts),
      wrap_([&out] { return out.columns(); }, [&out](std::string_view text) { out.write(text); }),
      markdown_(wrap_),
      began_(std::chrono::steady_clock::now()) {
  if (options.thinking) parser_.emplace(options.thinking->tags, options.prompt);
}

void AnswerPrinter::feed(std::string_view text) {
  if (parser_) {
    take(parser_->feed(text));
  } else {
    take({.reasoning = {}, .content = std::string(text)});
  }
}

void AnswerPrinter::take(const server::ReasoningParser::Step& step) {
  if (!step.reasoning.empty()) show_thought(step.reasoning);
  if (step.content.empty()) return;
  end_thought();
  answer_ += step.content;
  ends_in_break_ = step.content.ends_with('\n');
  if (!look_.terminal) {
    out_.write(step.content);
  } else if (look_.styles) {
    markdown_.feed(without_controls(step.content));
  } else {
    wrap_.text(without_controls(step.content));
  }
}

void AnswerPrinter::show_thought(std::string_view text) {
  if (!in_thought_ && look_.terminal && show_thoughts_) out_.write(look_.dim());
  in_thought_ = true;
  thought_ += text;
  if (show_thoughts_) {
    if (look_.terminal) {
      wrap_.text(without_controls(text));
    } else {
      out_.write(text);
    }
  } else if (look_.terminal) {
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began_;
    status_.text(fmt::format("thinking {:.0f} s", took.count()));
  }
}

void AnswerPrinter::end_thought() {
  if (!in_thought_) return;
  in_thought_ = false;
  status_.clear();
  if (show_thoughts_) {
    wrap_.flush();
    out_.write(look_.terminal ? std::string(look_.plain()) + "\n\n" : "\n\n");
  } else if (look_.terminal) {
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began_;
    out_.print("{}(thought for {:.1f} s){}\n", look_.dim(), took.count(), look_.plain());
  }
}

void AnswerPrinter::finish() {
  if (parser_) take(parser_->finish());
  end_thought();
  if (look_.terminal) {
    markdown_.finish();
    wrap_.flush();
  }
  if (!look_.terminal || !ends_in_break_ || answer_.empty()) out_.write("\n");
}

}  // namespace freshet::cli
