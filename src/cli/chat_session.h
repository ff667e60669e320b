// A conversation with a model, and the commands that the user gives about it.
//
// Used by one thread, except that stop() is thread-safe.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "base/json.h"
#include "base/status.h"
#include "cli/answer_printer.h"
#include "cli/chat_prompt.h"
#include "cli/command.h"
#include "cli/generation.h"

namespace freshet::cli {

class ChatSession {
 public:
  struct Options {
    std::string system;  // the system message, or ""
    SamplingParams params;
    bool stats = false;
    bool show_thoughts = false;
    TerminalLook look;
  };
  // The references must outlive the session.
  ChatSession(Options options, Context& context, Engine& engine, const ChatPrompt& prompt);

  // Answers `text` and appends both to the conversation. An answer that is stopped is kept up to
  // that point; if it had not begun, the message is taken back.
  Status say_to_model(const std::string& text);
  // Runs a command, a line that begins with a slash. Returns false when the conversation is over.
  Result<bool> command(const std::string& line);
  // Stops the answer in progress. Returns false if there is none.
  bool stop();

 private:
  struct Command;
  static const Command kCommands[];

  Status answer();
  // Reads the answer to the end.
  void read(Generation& generation, AnswerPrinter& printer, PromptProgress& progress);
  void remark_on(const Generation& generation, bool stopped);
  Result<int> tokens();  // of the conversation

  Result<std::vector<engine::Picture>> pictures();

  Status help(const std::string& rest);
  Status reset(const std::string& rest);
  Status system(const std::string& rest);
  Status image(const std::string& rest);
  Status retry(const std::string& rest);
  Status undo(const std::string& rest);
  Status trim(const std::string& rest);
  Status history(const std::string& rest);
  Status save(const std::string& rest);
  Status load(const std::string& rest);
  Status temperature(const std::string& rest);
  Status stats(const std::string& rest);
  Status thoughts(const std::string& rest);

  void forget();
  bool drop_oldest_turn();

  Options o_;
  Context& context_;
  Engine& engine_;
  const ChatPrompt& prompt_;
  std::optional<Thinking> thinking_;
  json::Array messages_;
  std::vector<std::string> attached_;                // files for the next message
  std::map<std::string, engine::Picture> pictures_;  // by file, as read
  std::string refused_;                              // a message for which there was no room
  FinishReason finish_ = FinishReason::kNone;
  std::mutex mutex_;
  Generation* current_ = nullptr;  // guarded by mutex_
};

}  // namespace freshet::cli
