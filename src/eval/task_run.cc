// Runs the items of a task file on a model.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <mutex>

#include "base/utf8.h"
#include "eval/tasks.h"
#include "sampling/logits.h"

namespace freshet::eval {
namespace {

// A choice as tokens. Those before `scored` belong to the prompt.
struct ChoiceIds {
  std::vector<int32_t> ids;
  size_t scored = 0;
};

// The tokens of prompt and choice together, as a model would read them; scored is what they do not
// share with the prompt alone.
Result<std::vector<ChoiceIds>> choice_ids(const TaskItem& item, const TaskPrompts& prompts) {
  FRESHET_ASSIGN_OR_RETURN(const std::string prompt, prompts.text(item));
  const auto alone = prompts.encode(prompt);
  const auto is_space = [](char c) { return c == ' ' || c == '\n' || c == '\t'; };
  std::vector<ChoiceIds> all;
  for (const std::string& choice : item.choices) {
    const bool space = prompts.chat == nullptr && !prompt.empty() && !is_space(prompt.back()) &&
                       !is_space(choice.front());
    ChoiceIds c{prompts.encode(prompt + (space ? " " : "") + choice), 0};
    const auto [end, other] = std::ranges::mismatch(c.ids, alone);
    c.scored = static_cast<size_t>(end - c.ids.begin());
    if (c.scored == c.ids.size() && c.scored > 0) --c.scored;
    if (c.scored == 0) {
      return invalid_argument("item {}: the prompt is empty and the vocabulary has no BOS token",
                              item.id);
    }
    all.push_back(std::move(c));
  }
  return all;
}

// Tokens that follow what a sequence holds. Position i of `ids` predicts targets[i]; the first
// `unscored` predictions do not count.
struct Feed {
  int sequence = 0;
  std::span<const int32_t> ids, targets;
  size_t unscored = 0;
  double log_likelihood = 0.0;
};

// Runs feeds of different sequences, in as few steps as the session's limits allow.
Status run_feeds(Session& session, std::span<Feed> feeds, LogitScratch& scratch) {
  const auto vocab = static_cast<size_t>(session.model().spec().vocab_size);
  const auto limit =
      static_cast<size_t>(std::min(session.options().batch, session.options().logit_rows));
  struct Part {
    Feed* feed;
    size_t from, count, first_row;  // first_row: in the part; count: none
  };
  for (size_t f = 0, at = 0; f < feeds.size();) {
    std::vector<Part> parts;
    std::vector<Session::Piece> pieces;
    for (size_t room = limit; room > 0 && f < feeds.size();) {
      Feed& feed = feeds[f];
      const size_t n = std::min(room, feed.ids.size() - at);
      const size_t row = feed.unscored > at ? std::min(feed.unscored - at, n) : 0;
      if (n > 0) {
        parts.push_back({&feed, at, n, row});
        pieces.push_back({feed.sequence, feed.ids.subspan(at, n),
                          row < n ? static_cast<int64_t>(row) : int64_t{-1}});
      }
      room -= n;
      at += n;
      if (at == feed.ids.size()) {
        ++f;
        at = 0;
      }
    }
    if (pieces.empty()) break;
    std::span<const float> rows = session.run(pieces);
    for (const Part& part : parts) {
      for (size_t i = part.first_row; i < part.count; ++i) {
        const auto row = rows.first(vocab);
        rows = rows.subspan(vocab);
        const auto target = static_cast<size_t>(part.feed->targets[part.from + i]);
        part.feed->log_likelihood +=
            row[target] - log_sum_exp(row, find_maxima(row, scratch), scratch);
      }
    }
  }
  for (const Feed& feed : feeds) {
    if (!std::isfinite(feed.log_likelihood))
      return internal_error("the model's logits are not finite");
  }
  return {};
}

int64_t characters(std::string_view text) {
  int64_t count = 0;
  for (size_t at = 0; at < text.size(); ++count) at += decode_utf8(text.substr(at, 4)).size;
  return count;
}

void judge(const TaskItem& item, ItemResult& result) {
  std::vector<double> normalised;
  for (size_t i = 0; i < item.choices.size(); ++i) {
    normalised.push_back(result.log_likelihoods[i] /
                         static_cast<double>(characters(item.choices[i])));
  }
  const auto best = [](const std::vector<double>& v) {
    return std::ranges::max_element(v) - v.begin();
  };
  result.correct = best(result.log_likelihoods) == item.answer;
  result.correct_normalised = best(normalised) == item.answer;
}

// Items side by side: the tokens that the choices of an item share are run once.
Status score_group(Session& session, std::span<const TaskItem> items,
                   std::span<const std::vector<ChoiceIds>> ids, LogitScratch& scratch,
                   std::span<ItemResult> results) {
  std::vector<size_t> shared;
  std::vector<Feed> feeds;
  size_t rounds = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    size_t common = ids[i].front().scored;
    for (const ChoiceIds& c : ids[i]) common = std::min(common, c.scored);
    // The last token of the prompt predicts the first of a choice.
    shared.push_back(session.rewinds() ? common - 1 : 0);
    rounds = std::max(rounds, ids[i].size());
    session.reset(static_cast<int>(i));
    if (shared.back() == 0) continue;
    const std::span<const int32_t> all(ids[i].front().ids);
    feeds.push_back({static_cast<int>(i), all.first(common - 1), {}, common - 1});
  }
  FRESHET_RETURN_IF_ERROR(run_feeds(session, feeds, scratch));
  for (size_t round = 0; round < rounds; ++round) {
    feeds.clear();
    for (size_t i = 0; i < items.size(); ++i) {
      if (round >= ids[i].size()) continue;
      const ChoiceIds& c = ids[i][round];
      const std::span<const int32_t> all(c.ids);
      session.set_length(static_cast<int>(i), static_cast<int64_t>(shared[i]));
      feeds.push_back({static_cast<int>(i), all.subspan(shared[i], all.size() - 1 - shared[i]),
                       all.subspan(shared[i] + 1), c.scored - 1 - shared[i]});
    }
    FRESHET_RETURN_IF_ERROR(run_feeds(session, feeds, scratch));
    for (const Feed& feed : feeds)
      results[static_cast<size_t>(feed.sequence)].log_likelihoods.push_back(feed.log_likelihood);
  }
  for (size_t i = 0; i < items.size(); ++i) judge(items[i], results[i]);
  return {};
}

// Shared with the engine's callbacks.
struct Answers {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::string> texts;
  size_t done = 0;
  Status error;
};

Request answer_request(const TaskItem& item, std::vector<int32_t> prompt, size_t index,
                       const std::shared_ptr<Answers>& answers) {
  Request request;
  request.prompt = std::move(prompt);
  request.params.temperature = 0.0f;
  request.params.max_tokens = item.max_tokens;
  request.params.stop = item.stop;
  request.on_delta = [answers, index](const Delta& delta) {
    const std::lock_guard lock(answers->mutex);
    answers->texts[index] += delta.text;
    if (delta.finish == FinishReason::kError) answers->error = delta.error;
  };
  request.on_done = [answers](const Usage&) {
    const std::lock_guard lock(answers->mutex);
    ++answers->done;
    answers->changed.notify_one();
  };
  return request;
}

}  // namespace

Result<std::string> TaskPrompts::text(const TaskItem& item) const {
  if (chat == nullptr) return item.prompt;
  tokenizer::Conversation conversation;
  json::Object message;
  message["role"] = "user";
  message["content"] = item.prompt;
  conversation.messages.emplace_back(std::move(message));
  return chat->render(conversation);
}

std::vector<int32_t> TaskPrompts::encode(const std::string& text) const {
  std::vector<int32_t> ids = tokenizer.encode(text, {.add_special = false});
  // A chat template writes the BOS token itself.
  if (chat == nullptr && tokenizer.bos()) ids.insert(ids.begin(), *tokenizer.bos());
  return ids;
}

Result<int64_t> longest_choice(const TaskFile& file, const TaskPrompts& prompts) {
  int64_t longest = 0;
  for (const TaskItem& item : file.items) {
    FRESHET_ASSIGN_OR_RETURN(const auto all, choice_ids(item, prompts));
    for (const ChoiceIds& c : all) longest = std::max(longest, std::ssize(c.ids));
  }
  return longest;
}

Result<std::vector<ItemResult>> score_choices(Session& session, const TaskFile& file,
                                              const TaskPrompts& prompts,
                                              const TaskProgress& progress) {
  std::vector<ItemResult> results(file.items.size());
  LogitScratch scratch(session.model().spec().vocab_size);
  const auto at_once = static_cast<size_t>(session.options().sequences);
  for (size_t first = 0; first < file.items.size(); first += at_once) {
    const size_t count = std::min(at_once, file.items.size() - first);
    const auto items = std::span(file.items).subspan(first, count);
    std::vector<std::vector<ChoiceIds>> ids;
    for (const TaskItem& item : items) {
      FRESHET_ASSIGN_OR_RETURN(ids.emplace_back(), choice_ids(item, prompts));
    }
    FRESHET_RETURN_IF_ERROR(
        score_group(session, items, ids, scratch, std::span(results).subspan(first, count)));
    if (!progress(static_cast<double>(first + count) / static_cast<double>(results.size())))
      return cancelled("interrupted");
  }
  return results;
}

Result<std::vector<ItemResult>> generate_answers(Engine& engine, const TaskFile& file,
                                                 const TaskPrompts& prompts,
                                                 const TaskProgress& progress) {
  const auto answers = std::make_shared<Answers>();
  answers->texts.resize(file.items.size());
  std::vector<uint64_t> running;
  const auto cancel_all = [&] {
    for (const uint64_t id : running) engine.cancel(id);
    std::unique_lock lock(answers->mutex);
    answers->changed.wait(lock, [&] { return answers->done == running.size(); });
  };
  for (size_t i = 0; i < file.items.size(); ++i) {
    const TaskItem& item = file.items[i];
    const auto text = prompts.text(item);
    auto id = text.ok() ? engine.submit(answer_request(item, prompts.encode(*text), i, answers))
                        : Result<uint64_t>(text.status());
    if (!id.ok()) {
      cancel_all();
      return id.status().with_context(fmt::format("{}, item {}", file.name, item.id));
    }
    running.push_back(*id);
  }
  std::unique_lock lock(answers->mutex);
  while (answers->done < running.size()) {
    answers->changed.wait_for(lock, std::chrono::milliseconds(100));
    const double fraction =
        static_cast<double>(answers->done) / static_cast<double>(running.size());
    lock.unlock();
    if (!progress(fraction)) {
      cancel_all();
      return cancelled("interrupted");
    }
    lock.lock();
  }
  FRESHET_RETURN_IF_ERROR(answers->error);
  std::vector<ItemResult> results(file.items.size());
  for (size_t i = 0; i < results.size(); ++i) {
    const TaskItem& item = file.items[i];
    ItemResult& r = results[i];
    r.output = std::move(answers->texts[i]);
    r.extracted = item.extraction.extract(r.output);
    r.correct = std::ranges::any_of(item.answers, [&](const std::string& answer) {
      return item.extraction.equal(r.extracted, answer);
    });
  }
  return results;
}

}  // namespace freshet::eval
