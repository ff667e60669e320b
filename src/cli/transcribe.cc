#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "base/mapped_file.h"
#include "cli/command.h"
#include "cli/generation.h"
#include "cli/model_path.h"
#include "cli/options.h"
#include "media/audio.h"
#include "server/speech_format.h"
#include "speech/languages.h"
#include "speech/transcription.h"
#include "tokenizer/tokenizer.h"

namespace freshet::cli {
namespace transcribe_command {

constexpr size_t kMaxFileBytes = size_t{2} << 30;

struct Options {
  std::string model;
  std::vector<std::string> files;
  std::string language;
  std::string prompt;
  std::string format = "text";
  bool translate = false;
  double temperature = 0.0;
  speech::RetryOptions retries;
  bool condition_on_previous_text = false;
  int64_t seed = -1;
  RunOptions run;
};

server::SpeechFormat format_of(const std::string& name) {
  if (name == "json") return server::SpeechFormat::kJson;
  if (name == "verbose_json") return server::SpeechFormat::kVerbose;
  if (name == "srt") return server::SpeechFormat::kSrt;
  return name == "vtt" ? server::SpeechFormat::kVtt : server::SpeechFormat::kText;
}

Result<speech::TranscribeOptions> transcribe_options(const Options& o, const Engine& engine,
                                                     const speech::SpeechModel& model) {
  speech::TranscribeOptions options;
  options.translate = o.translate;
  if (o.translate && model.tokens.translate < 0)
    return invalid_argument("--translate: the model is for English alone");
  if (!o.language.empty()) {
    options.language = speech::language_code(o.language);
    const bool known = model.tokens.languages.empty()
                           ? options.language == "en"
                           : model.tokens.language(options.language) >= 0;
    if (!known) return invalid_argument("--language {}: the model does not know it", o.language);
  }
  options.prompt = speech::prompt_tokens(model, engine.tokenizer(), o.prompt);
  options.temperature = static_cast<float>(o.temperature);
  options.retries = o.retries;
  options.condition_on_previous_text = o.condition_on_previous_text;
  if (o.seed >= 0) options.seed = static_cast<uint64_t>(o.seed);
  return options;
}

// Runs the windows of one sound, one after the other.
Status run_windows(Engine& engine, Context& context, speech::Transcription& work) {
  ProgressLine progress;
  while (!work.done()) {
    FRESHET_ASSIGN_OR_RETURN(const auto window, Generation::start(engine, work.next_window()));
    const Interrupts::Handler on_interrupt(
        context.interrupts, [&window] { window->cancel(); }, Interrupts::kPatience);
    std::vector<int32_t> ids;
    while (const auto delta = window->next())
      ids.insert(ids.end(), delta->ids.begin(), delta->ids.end());
    if (context.interrupts.requested()) return cancelled("interrupted");
    FRESHET_RETURN_IF_ERROR(window->status());
    work.take(ids);
    if (!work.segments().empty())
      progress.update("transcribing", work.segments().back().end / work.duration());
  }
  progress.clear();
  return {};
}

Status transcribe_file(const Options& o, Context& context, Engine& engine,
                       const speech::SpeechModel& model, const std::string& path) {
  FRESHET_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(path));
  auto samples =
      media::decode_audio_at(file.bytes(), model.mel.rate, {.encoded_bytes = kMaxFileBytes});
  if (!samples.ok()) return samples.status().with_context(path);
  if (samples->empty()) return invalid_argument("{}: the file holds no sound", path);
  FRESHET_ASSIGN_OR_RETURN(speech::TranscribeOptions options, transcribe_options(o, engine, model));
  server::SpeechRequest request;
  request.format = format_of(o.format);
  const double seconds = static_cast<double>(samples->size()) / model.mel.rate;
  const bool plain = o.format == "text" || o.format == "json";
  options.timestamps = !plain || seconds > model.window_seconds();
  request.options = options;
  speech::Transcription work(model, engine.tokenizer(), options, std::move(*samples));
  FRESHET_RETURN_IF_ERROR(run_windows(engine, context, work));
  std::string text = server::speech_response(request, work).body;
  if (!text.ends_with('\n')) text += '\n';
  context.out.write(text);
  return context.out.flush();
}

Status run_transcribe(const Options& o, Context& context) {
  FRESHET_ASSIGN_OR_RETURN(const auto engine, load_engine(o.run, o.model));
  FRESHET_ASSIGN_OR_RETURN(const speech::SpeechModel model, speech::read_speech_model(*engine));
  for (const std::string& path : o.files) {
    if (o.files.size() > 1) context.out.print("--- {}\n", path);
    FRESHET_RETURN_IF_ERROR(transcribe_file(o, context, *engine, model, path));
  }
  return {};
}

}  // namespace transcribe_command

void add_transcribe(CLI::App& program, Context& context, Action& action) {
  auto o = std::make_shared<transcribe_command::Options>();
  CLI::App* c = program.add_subcommand("transcribe", "Write down what is said in sound files");
  c->add_option("model", o->model, "Folder or name of a Whisper model")->required();
  c->add_option("files", o->files, "WAV or FLAC files")->required()->option_text("FILE ...");
  c->add_option("-l,--language", o->language,
                "The language spoken, by code or name (default: found out from the sound)");
  c->add_flag("--translate", o->translate, "Write down an English translation");
  c->add_option("-p,--prompt", o->prompt, "What was said before: names, spelling, style");
  c->add_option("-f,--format", o->format, "text, json, verbose_json, srt or vtt")
      ->check(CLI::IsMember({"text", "json", "verbose_json", "srt", "vtt"}))
      ->capture_default_str();
  c->add_option("--temp,--temperature", o->temperature, "Temperature; 0: the likeliest tokens")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  c->add_option("--temperature-increment-on-fallback", o->retries.temperature_increment,
                "Retry a window that fails a threshold, at a temperature this much higher; 0: no")
      ->check([](const std::string& text) -> std::string {
        const double x = std::strtod(text.c_str(), nullptr);
        const double least = static_cast<double>(speech::kLeastIncrement) - 1e-6;
        return x == 0.0 || (x >= least && x <= 1.0) ? "" : "must be 0 or from 0.05 to 1";
      })
      ->capture_default_str();
  c->add_option("--compression-ratio-threshold", o->retries.compression_ratio,
                "Make a window again if its text compresses better than this")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  c->add_option("--logprob-threshold", o->retries.logprob,
                "... or if the mean log-probability of its tokens is below this")
      ->check(CLI::Range(-1000.0, 0.0))
      ->capture_default_str();
  c->add_option("--no-speech-threshold", o->retries.no_speech,
                "Skip an unlikely window if silence is likelier than this")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  c->add_flag("--condition-on-previous-text", o->condition_on_previous_text,
              "Give each window the text of the windows before it");
  c->add_option("--seed", o->seed,
                "Seed of the random numbers; -1: another each time, or 0 at temperature 0")
      ->check(from_minus_one());
  add_engine_options(*c, o->run);
  add_examples(
      *c,
      "  freshet transcribe whisper-small/ talk.wav\n"
      "  freshet transcribe whisper-small/ talk.flac --language de --format srt > talk.srt");
  c->callback([o, &context, &action] {
    action = [o, &context] { return transcribe_command::run_transcribe(*o, context); };
  });
}

}  // namespace freshet::cli
