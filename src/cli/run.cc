#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "cli/answer_printer.h"
#include "cli/chat_prompt.h"
#include "cli/command.h"
#include "cli/generation.h"
#include "cli/model_inputs.h"
#include "cli/model_path.h"
#include "cli/options.h"
#include "cli/prompts.h"
#include "cli/text_width.h"
#include "engine/translation.h"
#include "layers/model.h"
#include "server/sampling_defaults.h"

namespace freshet::cli {
namespace run_command {

struct Options {
  std::string model;
  std::vector<std::string> words;  // positional: [MODEL] [PROMPT]
  std::string file;
  std::string ids_file;
  std::string inputs_file;
  std::vector<std::string> images;
  bool chat = false;
  bool raw = false;
  bool plain = false;
  std::string system;
  std::string chat_template;
  std::string source_language, target_language;
  int samples = 1;
  int logprobs = -1;
  int parallel = 32;
  bool print_ids = false;
  bool json = false;
  bool stats = false;
  bool stop_at_eos = false;
  RunOptions run;
  SamplingOptions sampling;
};

// The embedded model tells the same story each time unless options say otherwise: it is the first
// thing that a new user sees. Chosen by reading what it writes.
constexpr int64_t kDefaultModelSeed = 2;
constexpr float kDefaultModelTemperature = 0.6f;
constexpr float kDefaultModelPenalty = 1.15f;  // small models repeat themselves

// The model, and the prompt if the command line has one.
struct What {
  std::string model;
  std::optional<std::string> prompt;
  bool is_default() const { return model.empty() || model == "default"; }
};

bool gives_ids(const Options& o) {
  return !o.ids_file.empty() || !o.inputs_file.empty();
}

Result<What> understand(const Options& o) {
  What what{o.model, std::nullopt};
  std::vector<std::string> words = o.words;
  const bool elsewhere = !o.file.empty() || gives_ids(o);
  if (what.model.empty() && !words.empty() &&
      (words.size() > 1 || elsewhere || looks_like_model(words.front()))) {
    what.model = words.front();
    words.erase(words.begin());
  }
  if (words.size() > 1)
    return invalid_argument("more than one prompt: put it in quotes, or use --file");
  if (!words.empty()) what.prompt = words.front();
  if (what.prompt && elsewhere)
    return invalid_argument("give either a prompt or --file or --ids or --inputs");
  if (!o.ids_file.empty() && !o.inputs_file.empty())
    return invalid_argument("give either --ids or --inputs");
  return what;
}

const char* name_of(FinishReason reason) {
  switch (reason) {
    case FinishReason::kNone:
      return "none";
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kCancelled:
      return "cancelled";
    case FinishReason::kError:
      return "error";
  }
  return "none";
}

json::Array to_json(const std::vector<std::vector<TokenLogprob>>& logprobs) {
  json::Array tokens;
  for (const auto& list : logprobs) {
    json::Array entries;
    for (const TokenLogprob& t : list) {
      json::Object entry;
      entry["id"] = t.id;
      entry["logprob"] = static_cast<double>(t.logprob);
      entries.emplace_back(std::move(entry));
    }
    tokens.emplace_back(std::move(entries));
  }
  return tokens;
}

class Runner {
 public:
  Runner(const Options& options, Context& context, Engine& engine, SamplingParams params)
      : o_(options),
        context_(context),
        engine_(engine),
        params_(std::move(params)),
        prompt_only_(params_.max_tokens == 0) {
    if (prompt_only_) params_.max_tokens = 1;  // computed, and not shown
  }

  Status add_prompts(const What& what);
  Status run();

 private:
  struct Sample {
    std::string text;
    std::vector<int32_t> ids;
    std::vector<std::vector<TokenLogprob>> logprobs;
    FinishReason finish = FinishReason::kNone;
  };
  Status read_texts(const What& what);
  Status add_chat(ChatPrompt& chat);
  Status add_translations();
  bool translates() const { return !o_.source_language.empty() || !o_.target_language.empty(); }
  Result<std::optional<ChatPrompt>> chosen_template() const;
  Result<std::unique_ptr<Generation>> start(size_t index);
  Status finish(size_t index, Generation& generation);
  void stream(Generation& generation);
  void collect(Generation& generation, std::vector<Sample>& samples);
  // What else there is to say about a single prompt, on standard error.
  void remark_on(const Generation& generation) const;
  void print(size_t index, const Generation& generation, const std::vector<Sample>& samples);
  bool streams() const {
    return prompts_.size() == 1 && o_.samples == 1 && !o_.json && !o_.print_ids;
  }
  bool speculates() const {
    return !o_.run.speculation.config.empty() || !o_.run.speculation.draft_model.empty();
  }

  const Options& o_;
  Context& context_;
  Engine& engine_;
  SamplingParams params_;
  std::vector<std::string> texts_;  // empty if ids were given
  bool templated_ = false;          // prompts_ are texts_ in the chat template
  std::string rendered_;            // the last of them
  std::optional<Thinking> thinking_;
  bool prompt_only_ = false;                   // -n 0
  FinishReason finish_ = FinishReason::kNone;  // of the last sample
  std::vector<std::vector<int32_t>> prompts_;
  std::vector<engine::Picture> pictures_;  // of each prompt
  std::vector<Request> requests_;          // empty, or one for each prompt
};

Status Runner::read_texts(const What& what) {
  if (what.prompt) {
    texts_ = {*what.prompt};
  } else if (!o_.file.empty()) {
    FRESHET_ASSIGN_OR_RETURN(texts_, read_prompts(o_.file));
  } else if (!stdin_is_terminal()) {
    FRESHET_ASSIGN_OR_RETURN(std::string text, read_stdin());
    texts_ = {std::move(text)};
  }
  if (texts_.empty() || texts_.front().empty())
    return invalid_argument("no prompt: freshet run [MODEL] \"Once upon a time\"");
  if (engine_.tokenizer().vocab_size() == 0)
    return invalid_argument("this model has no vocabulary: give token ids with --ids");
  return {};
}

// The template that prompts are put in; none with --raw, or if the model has none and no option
// asks for one.
Result<std::optional<ChatPrompt>> Runner::chosen_template() const {
  if (o_.raw) return std::optional<ChatPrompt>();
  if (o_.chat || !o_.system.empty()) {
    FRESHET_ASSIGN_OR_RETURN(ChatPrompt chat,
                             ChatPrompt::make(engine_.tokenizer(), o_.chat_template));
    return std::optional<ChatPrompt>(std::move(chat));
  }
  return ChatPrompt::find(engine_.tokenizer(), o_.chat_template);
}

// Each text as a conversation, with all pictures in front of it.
Status Runner::add_chat(ChatPrompt& chat) {
  for (const std::string& file : o_.images) {
    FRESHET_ASSIGN_OR_RETURN(engine::Picture picture, read_picture_file(file, engine_));
    pictures_.push_back(std::move(picture));
  }
  chat.read_with(engine_.pictures());
  for (const std::string& text : texts_) {
    json::Array messages;
    if (!o_.system.empty()) messages.push_back(message("system", o_.system));
    messages.push_back(o_.images.empty() ? message("user", text)
                                         : message_with_pictures(o_.images, text));
    FRESHET_ASSIGN_OR_RETURN(rendered_, chat.render(messages));
    FRESHET_ASSIGN_OR_RETURN(engine::PictureText prompt, chat.encode_text(rendered_, pictures_));
    prompts_.push_back(std::move(prompt.ids));
  }
  return {};
}

Status Runner::add_translations() {
  const ModelSpec& spec = engine_.model().spec();
  if (spec.encoder == nullptr || spec.encoder->stem)
    return invalid_argument(
        "--source-language and --target-language are for models that translate");
  for (const std::string& text : texts_) {
    FRESHET_ASSIGN_OR_RETURN(TranslationPrompt prompt,
                             translation_prompt(engine_.tokenizer(), engine_.decoder_start(), text,
                                                o_.source_language, o_.target_language));
    Request& request = requests_.emplace_back();
    request.encoder_ids = std::move(prompt.encoder_ids);
    request.prompt = std::move(prompt.prompt);
    prompts_.push_back(request.prompt);
  }
  return {};
}

Status Runner::add_prompts(const What& what) {
  if (!o_.ids_file.empty()) {
    FRESHET_ASSIGN_OR_RETURN(prompts_, read_ids(o_.ids_file));
    return {};
  }
  if (!o_.inputs_file.empty()) {
    FRESHET_ASSIGN_OR_RETURN(std::vector<ModelInput> inputs, read_model_inputs(o_.inputs_file));
    FRESHET_RETURN_IF_ERROR(add_features(inputs, engine_.model_path(), engine_.model().spec()));
    for (size_t i = 0; i < inputs.size(); ++i) {
      auto request = request_of(inputs[i], engine_);
      if (!request.ok())
        return request.status().with_context(fmt::format("{}, list {}", o_.inputs_file, i));
      requests_.push_back(std::move(*request));
    }
    for (const Request& request : requests_) prompts_.push_back(request.prompt);
    return {};
  }
  FRESHET_RETURN_IF_ERROR(read_texts(what));
  if (translates()) return add_translations();
  FRESHET_ASSIGN_OR_RETURN(std::optional<ChatPrompt> chat, chosen_template());
  templated_ = chat.has_value();
  if (!templated_ && !o_.images.empty())
    return invalid_argument("--image needs a model with a chat template, or --chat-template");
  if (!templated_) {
    for (const std::string& text : texts_) prompts_.push_back(engine_.tokenizer().encode(text));
    return {};
  }
  FRESHET_RETURN_IF_ERROR(add_chat(*chat));
  // A terminal shows thoughts dimmed; other readers get the text as the model writes it.
  if (streams() && context_.out.is_terminal())
    thinking_ = find_thinking(chat->source(), engine_.tokenizer());
  if (thinking_ && thinking_->special) params_.skip_special_tokens = false;
  if (!o_.chat && o_.system.empty() && o_.chat_template.empty())
    say_dimmed(
        "freshet: answering as a chat, with the model's template (--raw: continue the text)");
  return {};
}

Result<std::unique_ptr<Generation>> Runner::start(size_t index) {
  Request request;
  if (!requests_.empty()) request = std::move(requests_[index]);
  request.prompt = prompts_[index];
  if (!pictures_.empty()) request.pictures = pictures_;
  request.params = params_;
  const int room = engine_.max_model_len() - static_cast<int>(request.prompt.size());
  if (!o_.sampling.max_tokens_given && room > 0)
    request.params.max_tokens = std::min(params_.max_tokens, room);
  return Generation::start(engine_, std::move(request));
}

// Prints deltas as they arrive.
void Runner::stream(Generation& generation) {
  const TerminalLook look = look_of(context_.out.is_terminal() && !o_.plain);
  PromptProgress progress(engine_, prompts_.front().size());
  // On a terminal the text that is continued stands before its continuation.
  if (look.terminal && !templated_ && !texts_.empty()) {
    context_.out.print("{}{}{}", look.dim(), without_controls(texts_.front()), look.plain());
    (void)context_.out.flush();
  }
  // Text that continues a prompt is not an answer: it is not taken for Markdown.
  AnswerPrinter printer(context_.out, templated_ ? look : TerminalLook{},
                        {.show_thoughts = true,
                         .thinking = look.terminal ? thinking_ : std::nullopt,
                         .prompt = rendered_});
  while (auto delta = generation.next([&progress] { progress.update(); })) {
    progress.done();
    if (!prompt_only_) printer.feed(delta->text);
    finish_ = delta->finish;
    if (!context_.out.flush().ok()) generation.cancel();
  }
  progress.done();
  printer.finish();
}

void Runner::collect(Generation& generation, std::vector<Sample>& samples) {
  while (auto delta = generation.next()) {
    Sample& s = samples[static_cast<size_t>(delta->index)];
    s.finish = finish_ = delta->finish;
    if (prompt_only_) continue;
    s.text += delta->text;
    s.ids.insert(s.ids.end(), delta->ids.begin(), delta->ids.end());
    s.logprobs.insert(s.logprobs.end(), delta->logprobs.begin(), delta->logprobs.end());
  }
}

// Reads deltas until the request is done; prints them as they arrive or at the end.
Status Runner::finish(size_t index, Generation& generation) {
  std::vector<Sample> samples(static_cast<size_t>(o_.samples));
  if (streams()) {
    stream(generation);
  } else {
    collect(generation, samples);
  }
  FRESHET_RETURN_IF_ERROR(context_.out.status());
  FRESHET_RETURN_IF_ERROR(generation.status());
  if (!streams() && !context_.interrupts.requested()) print(index, generation, samples);
  return context_.out.flush();
}

void Runner::remark_on(const Generation& generation) const {
  const std::string cut = why_cut(finish_, generation.usage(), engine_.max_model_len());
  const bool full = cut.find("full") != std::string::npos;
  if (!prompt_only_ && (full || (!cut.empty() && templated_ && stderr_is_terminal())))
    say_dimmed(fmt::format("freshet: {}", cut));
  if (o_.stats || stderr_is_terminal()) say_dimmed(speed_line(generation));
}

void Runner::print(size_t index, const Generation& generation, const std::vector<Sample>& samples) {
  for (size_t i = 0; i < samples.size(); ++i) {
    const Sample& s = samples[i];
    if (o_.json) {
      json::Object line;
      line["prompt_index"] = index;
      if (!texts_.empty()) line["prompt"] = texts_[index];
      line["sample"] = i;
      line["text"] = s.text;
      line["ids"] = ids_to_json(s.ids);
      line["finish_reason"] = name_of(s.finish);
      if (o_.logprobs >= 0) line["logprobs"] = to_json(s.logprobs);
      line["prompt_tokens"] = generation.usage().prompt_tokens;
      if (speculates()) {
        line["drafted_tokens"] = generation.usage().speculation.drafted_tokens;
        line["accepted_tokens"] = generation.usage().speculation.accepted_tokens;
      }
      context_.out.write(json::write(json::Value(std::move(line))) + "\n");
    } else if (o_.print_ids) {
      context_.out.write(json::write(json::Value(ids_to_json(s.ids))) + "\n");
    } else {
      if (prompts_.size() > 1) context_.out.print("--- {}\n", texts_.empty() ? "" : texts_[index]);
      if (samples.size() > 1) context_.out.print("--- sample {}\n", i + 1);
      context_.out.write(s.text + "\n");
    }
  }
}

Status Runner::run() {
  std::mutex mutex;
  std::deque<std::unique_ptr<Generation>> running;
  const auto cancel_all = [&] {
    const std::lock_guard lock(mutex);
    for (const auto& g : running) g->cancel();
  };
  const Interrupts::Handler on_interrupt(context_.interrupts, cancel_all, Interrupts::kPatience);
  size_t started = 0;
  for (size_t index = 0; index < prompts_.size(); ++index) {
    while (started < prompts_.size() && running.size() < static_cast<size_t>(o_.parallel)) {
      FRESHET_ASSIGN_OR_RETURN(auto g, start(started));
      const std::lock_guard lock(mutex);
      running.push_back(std::move(g));
      ++started;
    }
    FRESHET_RETURN_IF_ERROR(finish(index, *running.front()));
    if (context_.interrupts.requested()) return cancelled("interrupted");
    if (prompts_.size() == 1) remark_on(*running.front());
    std::unique_ptr<Generation> over;  // outlives the lock
    const std::lock_guard lock(mutex);
    over = std::move(running.front());
    running.pop_front();
  }
  return {};
}

Result<SamplingParams> params_of(const Options& o, const What& what,
                                 const std::string& model_path) {
  SamplingOptions sampling = o.sampling;
  const bool ids = gives_ids(o);  // then only options that were given count
  if (ids && sampling.command->count("--generation-config") == 0)
    sampling.generation_config = "none";
  if (what.is_default() && !ids) {
    if (sampling.seed < 0) sampling.seed = kDefaultModelSeed;
    const auto missing = [&](const char* name) { return sampling.command->count(name) == 0; };
    SamplingParams& p = sampling.params;
    // Greedy and beam search stay what they are: the likeliest tokens, without a penalty.
    if (missing("--temperature") && p.beam_width == 0) {
      p.temperature = kDefaultModelTemperature;
      if (missing("--repetition-penalty")) p.repetition_penalty = kDefaultModelPenalty;
    }
  }
  FRESHET_ASSIGN_OR_RETURN(SamplingParams p, sampling_params(sampling, model_path));
  p.n = o.samples;
  p.logprobs = o.logprobs;
  if (ids) p.ignore_eos = !o.stop_at_eos;
  return p;
}

// What the model's authors ask for besides, and options that do it.
void say_what_is_left_out(const Options& o, int beams, const std::string& path) {
  const std::string left =
      beams > 0 ? "" : server::left_out_defaults(o.sampling.generation_config, path);
  if (left.empty()) return;
  say_dimmed(fmt::format(
      "freshet: generation_config.json also asks for {}: --beams searches with beams", left));
}

Status run(const Options& o, Context& context) {
  FRESHET_ASSIGN_OR_RETURN(const What what, understand(o));
  if (o.logprobs >= 0 && !o.json) return invalid_argument("--logprobs needs --json");
  const bool asks_for_chat = o.chat || !o.system.empty() || !o.chat_template.empty();
  if (o.raw && asks_for_chat) {
    return invalid_argument(
        "--raw continues the text as it is: leave out --chat, --system and --chat-template");
  }
  if (!o.images.empty() && (o.raw || gives_ids(o)))
    return invalid_argument(
        "--image goes with a prompt for a chat: leave out --raw, --ids, --inputs");
  if (gives_ids(o) && asks_for_chat) {
    return invalid_argument(
        "--ids and --inputs are taken as they are: leave out --chat, --system and --chat-template");
  }
  FRESHET_RETURN_IF_ERROR(check_sampling(o.sampling));
  FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(what.model));
  FRESHET_ASSIGN_OR_RETURN(SamplingParams params, params_of(o, what, path));
  FRESHET_ASSIGN_OR_RETURN(const auto engine, load_engine(o.run, what.model));
  const int beams = params.beam_width;
  Runner runner(o, context, *engine, std::move(params));
  FRESHET_RETURN_IF_ERROR(runner.add_prompts(what));
  if (what.model.empty())
    say_dimmed(
        "freshet: no model given; the embedded one (21.5M parameters) continues the text, the same "
        "way each time (--seed changes it)");
  if (!gives_ids(o)) say_what_is_left_out(o, beams, path);
  return runner.run();
}

}  // namespace run_command

void add_run(CLI::App& program, Context& context, Action& action) {
  auto o = std::make_shared<run_command::Options>();
  CLI::App* c = program.add_subcommand("run", "Answer a prompt, or continue a text");
  c->add_option("words", o->words,
                "The model (default: the embedded one) and the text (default: standard input)")
      ->option_text("[MODEL] [PROMPT]")
      ->expected(0, 2);
  c->add_option("-m,--model", o->model, "Model folder, .gguf file or name");
  c->add_option("-f,--file", o->file,
                "A file with one prompt per line, run in parallel; -: standard input");
  c->add_option("--ids", o->ids_file,
                "A JSON file with prompts as a list of lists of token ids (implies --ignore-eos)");
  c->add_option("--inputs", o->inputs_file,
                "A .safetensors file with prompts as tensors ids_i, or with what an encoder reads "
                "and decoder_ids_i (implies --ignore-eos)");
  c->add_flag("--stop-at-eos", o->stop_at_eos,
              "With --ids or --inputs: stop at an end-of-text token (default: ignore it)");
  c->add_option("--image", o->images,
                "A PNG, JPEG or WebP file for a model that reads pictures; may be repeated")
      ->allow_extra_args(false);
  c->add_flag("--raw", o->raw,
              "Continue the prompt as it is (default: only if the model has no chat template)");
  c->add_flag("--chat", o->chat,
              "Fail if the model has no chat template, instead of continuing the prompt");
  c->add_option("--system", o->system, "The system message, for a model with a chat template");
  c->add_option("--chat-template", o->chat_template,
                "A Jinja file to use instead of the model's template");
  c->add_option("--source-language", o->source_language,
                "Of models that translate: the text's language, e.g. eng_Latn");
  c->add_option("--target-language", o->target_language,
                "Of models that translate: the language to write, e.g. deu_Latn");
  c->add_option("--samples", o->samples, "Number of answers per prompt")
      ->check(CLI::Range(1, 1024));
  c->add_option("--parallel", o->parallel, "Number of prompts that run at the same time")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  c->add_flag("--print-ids", o->print_ids, "Print the new token ids, one JSON array per line");
  c->add_flag("--json", o->json, "Print one JSON object per line: text, ids, finish_reason ...");
  c->add_option("--logprobs", o->logprobs,
                "With --json: log-probabilities of this many most likely tokens")
      ->check(CLI::Range(0, 1024));
  c->add_flag("--plain", o->plain,
              "On a terminal: print the answer as it is, without wrapped lines and Markdown");
  c->add_flag("--stats", o->stats, "Print the speed to standard error (default on a terminal)");
  add_sampling_options(*c, o->sampling, 256);
  add_mmproj_option(*c, o->run);
  add_overrides_option(*c, o->run);
  add_engine_options(*c, o->run);
  add_examples(*c,
               "  freshet run \"Once upon a time\"\n"
               "  freshet run smollm2 \"What is the capital of France?\"\n"
               "  freshet run ./qwen2.5-vl --image cat.png \"What is this?\"\n"
               "  freshet run model.gguf -f prompts.txt -n 64 --json > answers.jsonl\n"
               "  freshet run model/ --ids ids.json -n 24 --temp 0 --print-ids");
  c->callback([o, &context, &action] { action = [o, &context] { return run(*o, context); }; });
}

}  // namespace freshet::cli
