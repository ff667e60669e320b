#include <algorithm>
#include <memory>
#include <string>

#include "base/json.h"
#include "base/mapped_file.h"
#include "cli/command.h"
#include "cli/eval_texts.h"
#include "cli/model_inputs.h"
#include "cli/model_path.h"
#include "cli/options.h"
#include "cli/prompts.h"
#include "eval/logits.h"
#include "eval/pictures.h"
#include "eval/safetensors_writer.h"
#include "eval/session.h"
#include "media/features.h"
#include "models/pooled_heads.h"
#include "runtime/picture_settings.h"
#include "tokenizer/tokenizer.h"

namespace freshet::cli {
namespace eval_command {

// Rows of logits in memory at once: enough for efficient GEMMs, little compared with a model.
constexpr int64_t kRows = 128;

struct Options {
  std::string model;
  std::string input;
  std::string inputs;
  std::string output;
  bool features = false;
  int64_t window = 512;
  int64_t max_chars = 0;
  int batch = 4;
  bool json = false;
  RunOptions run;
};

struct Sizes {
  int sequences;
  int64_t context;
  int64_t batch;
  int64_t logit_rows;
  bool states = false;
  bool encodes = false;
};

Result<std::unique_ptr<eval::Session>> open(const Options& o, const Sizes& sizes) {
  FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(o.model));
  eval::SessionOptions s = session_options(o.run, path);
  s.sequences = sizes.sequences;
  s.context = sizes.context;
  s.batch = sizes.batch;
  s.logit_rows = sizes.logit_rows;
  s.states = sizes.states;
  s.encodes = sizes.encodes;
  ProgressLine progress;
  s.on_progress = [&progress](const std::string& stage, double fraction) {
    progress.update(stage, fraction);
  };
  return open_on_device(o.run, progress, s, eval::Session::open);
}

Result<std::vector<ModelInput>> read_inputs(const Options& o) {
  if (o.input.empty() == o.inputs.empty()) return invalid_argument("give either --ids or --inputs");
  if (!o.inputs.empty()) return read_model_inputs(o.inputs);
  FRESHET_ASSIGN_OR_RETURN(auto lists, read_ids(o.input));
  std::vector<ModelInput> inputs;
  for (auto& list : lists) inputs.emplace_back().ids = std::move(list);
  return inputs;
}

EncoderInput encoder_input(const ModelInput& input) {
  EncoderInput encoder;
  encoder.ids = input.encoder_ids;
  encoder.features = input.features.data();
  encoder.frames = input.frames;
  return encoder;
}

Status check_encoder_input(const ModelInput& input, const ModelSpec& spec) {
  const bool given = !input.encoder_ids.empty() || input.frames > 0;
  if (spec.encoder == nullptr) {
    return given ? invalid_argument("decoder_ids, but the model has no encoder") : Status();
  }
  if (!given) return invalid_argument("the model has an encoder: decoder_ids are missing");
  const auto& stem = spec.encoder->stem;
  if (stem ? input.mel_bins != stem->mel_bins : input.encoder_ids.empty()) {
    return invalid_argument(
        "the encoder reads {}",
        stem ? fmt::format("input_features of {} mel bins", stem->mel_bins) : "ids");
  }
  FRESHET_RETURN_IF_ERROR(eval::check_ids(input.encoder_ids, spec.vocab_size));
  const EncoderInput encoder = encoder_input(input);
  if (encoder.positions() > spec.encoder->max_context) {
    return invalid_argument("{} positions: the encoder has {}", encoder.positions(),
                            spec.encoder->max_context);
  }
  return {};
}

Status check_input(const ModelInput& input, const ModelSpec& spec) {
  FRESHET_RETURN_IF_ERROR(check_encoder_input(input, spec));
  FRESHET_RETURN_IF_ERROR(eval::check_ids(input.ids, eval::known_ids(spec)));
  for (const int32_t type : input.token_type_ids) {
    if (type >= std::max(spec.token_types, 1))
      return invalid_argument("token type {}: the model has {}", type, spec.token_types);
  }
  return {};
}

// What eval_logits() computes, by the model's head.
struct Wanted {
  ModelSpec spec;
  PooledHeads heads;
  std::vector<ModelInput> inputs;
  std::vector<std::vector<media::ImageInput>> pictures;  // [inputs]
  std::vector<eval::PixelValues> features;               // [inputs]; empty if they are not wanted
  int64_t longest = 0, tokens = 0;
  int64_t longest_span = 0;     // of tokens that see one another
  bool sound_features = false;  // those that were made of sounds are written, too

  bool writes_features(const ModelInput& input) const {
    return sound_features && !input.audio.empty();
  }
  std::vector<eval::SafetensorsWriter::Entry> entries() const {
    std::vector<eval::SafetensorsWriter::Entry> out;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!features.empty() && !features[i].values.empty())
        out.push_back({fmt::format("pixel_values_{}", i), features[i].shape});
      const int64_t length = std::ssize(inputs[i].ids);
      if (writes_features(inputs[i])) {
        out.push_back(
            {fmt::format("input_features_{}", i), {inputs[i].mel_bins, inputs[i].frames}});
      }
      if (spec.generates) {
        out.push_back({fmt::format("logits_{}", i), {length, spec.vocab_size}});
      } else if (heads.classifier) {
        out.push_back({fmt::format("score_{}", i), {heads.classifier->size}});
      } else {
        out.push_back({fmt::format("hidden_{}", i), {length, spec.hidden_size}});
        out.push_back({fmt::format("embedding_{}", i), {heads.embedding.size}});
      }
    }
    return out;
  }
};

// The pictures of input `i`, made ready, and their places.
Status read_pictures(const loader::Checkpoint& checkpoint, const Options& o, size_t i, Wanted& w) {
  const ModelInput& input = w.inputs[i];
  std::vector<media::ImageInput>& pictures = w.pictures[i];
  if (!input.has_pictures()) return {};
  if (w.spec.vision == nullptr)
    return invalid_argument("pictures, but the model has no tower that is read");
  const bool processes = input.pixels.values.empty() || o.features;
  media::ImageSettings settings;
  if (processes) {
    FRESHET_ASSIGN_OR_RETURN(settings, runtime::picture_settings(checkpoint));
  }
  if (input.pixels.values.empty()) {
    FRESHET_ASSIGN_OR_RETURN(pictures,
                             eval::process_pictures(input.images, settings, *w.spec.vision));
  } else {
    FRESHET_ASSIGN_OR_RETURN(pictures, eval::split_pixels(input.pixels, *w.spec.vision));
  }
  if (o.features && !input.images.empty()) {
    FRESHET_ASSIGN_OR_RETURN(media::MediaFeatures made, media::features_of(input.images, settings));
    w.features[i].shape = std::move(made.shape);
    w.features[i].values = std::move(made.values);
  }
  FRESHET_ASSIGN_OR_RETURN(const runtime::PicturePrompt prompt,
                           eval::place(w.spec, input.ids, pictures));
  w.longest_span = std::max(w.longest_span, eval::longest_span(prompt));
  return {};
}

Result<Wanted> read_wanted(const Options& o) {
  Wanted w;
  FRESHET_ASSIGN_OR_RETURN(w.inputs, read_inputs(o));
  FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(o.model));
  runtime::LoadOptions loading;
  loading.model = path;
  loading.mmproj = o.run.mmproj;
  loading.hf_overrides = o.run.hf_overrides;
  FRESHET_ASSIGN_OR_RETURN(const auto checkpoint, runtime::open_checkpoint(loading));
  FRESHET_ASSIGN_OR_RETURN(w.spec, read_spec(checkpoint));
  FRESHET_RETURN_IF_ERROR(add_features(w.inputs, path, w.spec));
  w.sound_features = o.features;
  const auto token_id = [&](std::string_view token) {
    const auto tokenizer = tokenizer::Tokenizer::load(path);
    return tokenizer.ok() ? tokenizer->token_to_id(token) : std::nullopt;
  };
  FRESHET_ASSIGN_OR_RETURN(w.heads, models::read_pooled_heads(checkpoint, w.spec, token_id));
  w.pictures.resize(w.inputs.size());
  if (o.features) w.features.resize(w.inputs.size());
  for (size_t i = 0; i < w.inputs.size(); ++i) {
    const std::string where = fmt::format("{}, list {}", o.inputs + o.input, i);
    FRESHET_RETURN_IF_ERROR(check_input(w.inputs[i], w.spec).with_context(where));
    FRESHET_RETURN_IF_ERROR(read_pictures(checkpoint, o, i, w).with_context(where));
    w.longest = std::max(w.longest, std::ssize(w.inputs[i].ids));
    w.tokens += std::ssize(w.inputs[i].ids);
  }
  return w;
}

// The states of one input and what is pooled from them.
Status write_states(eval::Session& session, const Wanted& w, const ModelInput& input,
                    eval::SafetensorsWriter& writer) {
  session.reset(0);
  const eval::Session::Piece piece{
      .sequence = 0, .ids = input.ids, .token_types = input.token_type_ids};
  const std::span<const float> states = session.run_states({&piece, 1});
  const PooledHead& head = w.heads.classifier ? *w.heads.classifier : w.heads.embedding;
  PoolState pool(head.pool);
  const auto hidden = static_cast<size_t>(w.spec.hidden_size);
  for (size_t t = 0; t < input.ids.size(); ++t) pool.add(states.subspan(t * hidden, hidden));
  if (!w.heads.classifier) FRESHET_RETURN_IF_ERROR(writer.write(states));
  std::vector<float> result = head.run(pool.result());
  if (head.normalize) normalize_vector(result);
  return writer.write(result);
}

Status eval_logits(const Options& o, Context& context) {
  FRESHET_ASSIGN_OR_RETURN(const Wanted w, read_wanted(o));
  const bool whole = !w.spec.generates;
  const int64_t rows = kRows + w.longest_span;
  FRESHET_ASSIGN_OR_RETURN(const auto session, open(o, {.sequences = 1,
                                                        .context = w.longest,
                                                        .batch = whole ? w.longest : rows,
                                                        .logit_rows = rows,
                                                        .states = whole,
                                                        .encodes = true}));
  FRESHET_ASSIGN_OR_RETURN(auto writer, eval::SafetensorsWriter::create(o.output, w.entries()));
  FRESHET_RETURN_IF_ERROR(eval::reserve_tower(session->loaded()->model(), w.pictures));
  const Interrupts::Handler on_interrupt(context.interrupts, [] {});
  ProgressLine progress;
  int64_t done = 0;
  const auto advance = [&](int64_t tokens) -> Status {
    if (context.interrupts.requested()) return cancelled("interrupted");
    done += tokens;
    progress.update(whole ? "computing states" : "computing logits",
                    static_cast<double>(done) / static_cast<double>(w.tokens));
    return {};
  };
  for (size_t i = 0; i < w.inputs.size(); ++i) {
    const ModelInput& input = w.inputs[i];
    if (!w.features.empty()) FRESHET_RETURN_IF_ERROR(writer.write(w.features[i].values));
    if (w.writes_features(input)) FRESHET_RETURN_IF_ERROR(writer.write(input.features));
    if (whole) {
      FRESHET_RETURN_IF_ERROR(write_states(*session, w, input, writer));
      FRESHET_RETURN_IF_ERROR(advance(std::ssize(input.ids)));
      continue;
    }
    FRESHET_ASSIGN_OR_RETURN(
        const eval::SeenPictures pictures,
        eval::see_pictures(session->loaded()->model(), input.ids, w.pictures[i]));
    EncoderInput encoder = encoder_input(input);
    encoder.states = pictures.cross.data();
    encoder.state_rows = pictures.cross_rows;
    const bool sees = !w.pictures[i].empty();
    FRESHET_RETURN_IF_ERROR(eval::each_logits(*session, input.ids, encoder,
                                              sees ? &pictures : nullptr,
                                              [&](int64_t, std::span<const float> row) -> Status {
                                                const Status advanced = advance(1);
                                                return advanced.ok() ? writer.write(row) : advanced;
                                              }));
  }
  progress.clear();
  FRESHET_RETURN_IF_ERROR(writer.close());
  if (o.json) {
    json::Object result;
    result["sequences"] = w.inputs.size();
    result["tokens"] = w.tokens;
    result["vocab_size"] = w.spec.vocab_size;
    result["output"] = o.output;
    context.out.write(json::write(json::Value(std::move(result))) + "\n");
  }
  return {};
}

Status eval_perplexity(const Options& o, Context& context) {
  FRESHET_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(o.input));
  std::string_view text(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
  if (o.max_chars > 0) text = first_characters(text, o.max_chars);
  FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(o.model));
  FRESHET_ASSIGN_OR_RETURN(const auto tokenizer, tokenizer::Tokenizer::load(path));
  const auto ids = tokenizer.encode(text, {.add_special = false});
  eval::PerplexityOptions options;
  options.window = o.window;
  options.bos = tokenizer.bos().value_or(-1);
  FRESHET_ASSIGN_OR_RETURN(const auto session, open(o, {.sequences = o.batch,
                                                        .context = o.window + 1,
                                                        .batch = kRows * o.batch,
                                                        .logit_rows = kRows * o.batch}));
  const Interrupts::Handler on_interrupt(context.interrupts, [] {}, Interrupts::kPatience);
  ProgressLine progress;
  FRESHET_ASSIGN_OR_RETURN(const eval::Perplexity p,
                           eval::perplexity(*session, ids, options, [&](double fraction) {
                             progress.update("scoring", fraction);
                             return !context.interrupts.requested();
                           }));
  progress.clear();
  if (!o.json) {
    context.out.print(
        "{:.4f} +- {:.4f} nats per token (perplexity {:.3f}) over {} tokens in {} windows of {}\n",
        p.nats_per_token, p.standard_error, std::exp(p.nats_per_token), p.tokens, p.windows,
        o.window);
    return {};
  }
  json::Object result;
  result["nats_per_token"] = p.nats_per_token;
  result["standard_error"] = p.standard_error;
  result["perplexity"] = std::exp(p.nats_per_token);
  result["tokens"] = p.tokens;
  result["windows"] = p.windows;
  result["window"] = o.window;
  context.out.write(json::write(json::Value(std::move(result))) + "\n");
  return {};
}

}  // namespace eval_command

void add_eval(CLI::App& program, Context& context, Action& action) {
  CLI::App* c =
      program.add_subcommand("eval", "Evaluate a model: perplexity, loss of quantisation, tasks");
  c->require_subcommand(1);

  auto l = std::make_shared<eval_command::Options>();
  CLI::App* logits =
      c->add_subcommand("logits", "Write what a model computes for lists of token ids");
  logits->add_option("model", l->model, "Model folder, .gguf file or name")->required();
  logits->add_option("--ids", l->input, "A JSON file with a list of lists of token ids");
  logits->add_option(
      "--inputs", l->inputs,
      "A .safetensors file with ids_i and, for encoders, token_type_ids_i; for "
      "models that read pictures image_i_k (U8, [height, width, 3]) or pixel_values_i");
  logits
      ->add_option(
          "-o,--output", l->output,
          "The .safetensors file to write, F32: logits_i [tokens, vocabulary]; of encoders "
          "hidden_i [tokens, features] and embedding_i; of classifiers score_i")
      ->required();
  logits->add_flag(
      "--features", l->features,
      "Also write what is made of audio_i and image_i_k: input_features_i, pixel_values_i");
  logits->add_flag("--json", l->json, "Print what was written as JSON");
  add_mmproj_option(*logits, l->run);
  add_overrides_option(*logits, l->run);
  add_compute_options(*logits, l->run);
  add_examples(*logits,
               "  freshet eval logits model/ --ids ids.json -o logits.safetensors --reference\n"
               "  freshet eval logits bert/ --inputs texts.safetensors -o states.safetensors");
  logits->callback(
      [l, &context, &action] { action = [l, &context] { return eval_logits(*l, context); }; });

  auto p = std::make_shared<eval_command::Options>();
  CLI::App* perplexity =
      c->add_subcommand("perplexity", "Measure how well a model predicts a text");
  perplexity->add_option("model", p->model, "Model folder, .gguf file or name")->required();
  perplexity->add_option("file", p->input, "The text file")->required();
  perplexity
      ->add_option("--window", p->window, "Tokens per window; each window starts with a BOS token")
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  perplexity->add_option("--max-chars", p->max_chars, "Use only the first N characters of the text")
      ->check(not_negative());
  perplexity->add_option("--batch", p->batch, "Windows per batch")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  perplexity->add_flag("--json", p->json, "Print a JSON object: nats_per_token ...");
  add_compute_options(*perplexity, p->run);
  add_examples(*perplexity,
               "  freshet eval perplexity smollm2 book.txt --window 512 --max-chars 60000 --json");
  perplexity->callback(
      [p, &context, &action] { action = [p, &context] { return eval_perplexity(*p, context); }; });
  add_eval_compare(*c, context, action);
  add_eval_kv(*c, context, action);
  add_eval_quant(*c, context, action);
  add_eval_tasks(*c, context, action);
  add_eval_speculation(*c, context, action);
}

}  // namespace freshet::cli
