// The commands that get, list, describe and remove models.
#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/units.h"
#include "cli/command.h"
#include "cli/model_path.h"
#include "hub/catalogue.h"
#include "hub/pull.h"
#include "layers/model.h"
#include "loader/checkpoint.h"

namespace freshet::cli {
namespace models_command {

namespace fs = std::filesystem;

struct Options {
  std::string model;
  bool json = false;
  bool catalogue = false;
  int retries = 5;
};

// A model on this machine.
struct Local {
  std::string name;  // what a command takes as MODEL
  std::string path;
  int64_t bytes = 0;
  std::string repo, commit;  // empty if it does not come from the hub
};

std::string amount(int64_t bytes) {
  return format_bytes(static_cast<size_t>(bytes));
}

int64_t bytes_at(const fs::path& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    const auto size = fs::file_size(path, error);
    return error ? 0 : static_cast<int64_t>(size);
  }
  int64_t sum = 0;
  for (fs::recursive_directory_iterator it(path, error), end; !error && it != end;
       it.increment(error)) {
    std::error_code ignored;
    if (it->is_regular_file(ignored)) sum += static_cast<int64_t>(it->file_size(ignored));
  }
  return sum;
}

Local to_local(const hub::CachedModel& m) {
  Local l{.name = m.ref.text(),
          .path = m.path,
          .bytes = m.selection.bytes(),
          .repo = m.ref.repo,
          .commit = m.commit};
  const std::string_view known = hub::name_of_repo(m.ref.repo);
  if (!known.empty() && m.ref.revision == "main")
    l.name = m.ref.quant.empty() ? std::string(known) : fmt::format("{}:{}", known, m.ref.quant);
  return l;
}

// The files that were fetched from URLs.
std::vector<Local> downloads(const std::string& folder) {
  std::vector<Local> found;
  std::error_code error;
  for (fs::recursive_directory_iterator it(folder + "/downloads", error), end; !error && it != end;
       it.increment(error)) {
    if (it->path().extension() == ".gguf")
      found.push_back({.name = it->path().string(),
                       .path = it->path().string(),
                       .bytes = bytes_at(it->path()),
                       .repo = {},
                       .commit = {}});
  }
  return found;
}

Result<std::vector<Local>> local_models() {
  std::vector<Local> found;
  for (const std::string& name : local_names()) {
    const std::string path = local_model(name);
    if (!path.empty())
      found.push_back(
          {.name = name, .path = path, .bytes = bytes_at(path), .repo = {}, .commit = {}});
  }
  if (const auto folder = model_folder(); folder.ok()) {
    for (Local& l : downloads(*folder)) found.push_back(std::move(l));
  }
  FRESHET_ASSIGN_OR_RETURN(const hub::Settings settings, hub::Settings::from_environment());
  for (const hub::CachedModel& m : hub::Cache(settings.cache).list()) found.push_back(to_local(m));
  return found;
}

// The longest of the texts, for a padded column.
template <class Rows, class Text>
size_t column_width(const Rows& rows, const Text& text, size_t least) {
  for (const auto& row : rows) least = std::max(least, text(row).size());
  return least;
}

void print_catalogue(const Options& o, Output& out) {
  json::Array list;
  const auto name_of = [](const hub::CatalogueEntry& e) { return e.name; };
  const auto about_of = [](const hub::CatalogueEntry& e) { return e.about; };
  const size_t name_width = column_width(hub::catalogue(), name_of, 4);
  const size_t about_width = column_width(hub::catalogue(), about_of, 5);
  if (!o.json)
    out.print("{:{}}  {:{}}  {:27}  HUB\n", "NAME", name_width, "MODEL", about_width, "LICENCE");
  for (const hub::CatalogueEntry& e : hub::catalogue()) {
    if (o.json) {
      json::Object row;
      row["name"] = e.name;
      row["model"] = e.about;
      row["licence"] = e.licence;
      row["repo"] = e.repo;
      list.emplace_back(std::move(row));
    } else {
      out.print("{:{}}  {:{}}  {:27}  {}\n", e.name, name_width, e.about, about_width, e.licence,
                e.repo);
    }
  }
  if (o.json) out.write(json::write(json::Value(std::move(list)), {.indent = 2}) + "\n");
}

Status list(const Options& o, Output& out) {
  if (o.catalogue) {
    print_catalogue(o, out);
    return {};
  }
  FRESHET_ASSIGN_OR_RETURN(const std::vector<Local> models, local_models());
  if (o.json) {
    json::Array rows;
    for (const Local& l : models) {
      json::Object row;
      row["name"] = l.name;
      row["path"] = l.path;
      row["bytes"] = l.bytes;
      if (!l.repo.empty()) row["repo"] = l.repo;
      if (!l.commit.empty()) row["commit"] = l.commit;
      rows.emplace_back(std::move(row));
    }
    out.write(json::write(json::Value(std::move(rows)), {.indent = 2}) + "\n");
    return {};
  }
  if (models.empty()) {
    say("No models on this machine yet. Try: freshet pull smollm2-360m "
        "(freshet list --catalogue shows more)");
    return {};
  }
  const size_t width = column_width(models, [](const Local& l) { return l.name; }, 4);
  out.print("{:{}}  {:>9}  PATH\n", "NAME", width, "SIZE");
  for (const Local& l : models)
    out.print("{:{}}  {:>9}  {}\n", l.name, width, amount(l.bytes), l.path);
  return {};
}

Status pull(const Options& o, Output& out) {
  FRESHET_ASSIGN_OR_RETURN(const auto ref, hub_model(o.model));
  FRESHET_ASSIGN_OR_RETURN(hub::Settings settings, hub::Settings::from_environment());
  settings.retries = o.retries;
  const DownloadView view;
  if (!ref && is_url(o.model)) {
    FRESHET_ASSIGN_OR_RETURN(const std::string folder, model_folder());
    FRESHET_ASSIGN_OR_RETURN(const std::string path,
                             hub::pull_url(settings, folder, o.model, view.observer()));
    out.write(path + "\n");
    return {};
  }
  if (!ref) {
    // The messages for words that are no model of the hub.
    FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(o.model));
    say(fmt::format("{} is on this machine already", o.model));
    out.write(path + "\n");
    return {};
  }
  const auto got = hub::pull(settings, *ref, view.observer());
  if (!got.ok()) return with_other_source(got.status(), o.model);
  const hub::Pulled& pulled = *got;
  view.clear();
  say(fmt::format("{}: {}, {}{}", ref->text(), amount(pulled.model.selection.bytes()),
                  pulled.downloaded > 0 ? fmt::format("{} downloaded", amount(pulled.downloaded))
                                        : "up to date",
                  pulled.licence.empty() ? "" : fmt::format("; licence: {}", pulled.licence)));
  out.write(pulled.model.path + "\n");
  return {};
}

Status remove(const Options& o, Output& out) {
  FRESHET_ASSIGN_OR_RETURN(const std::string folder, model_folder());
  std::string path = local_model(o.model);
  if (path.empty() && is_url(o.model)) {
    if (auto place = hub::path_of_url(folder, o.model); place.ok()) path = *place;
  }
  if (path.empty() && o.model.starts_with(folder + "/downloads/")) path = o.model;
  std::error_code error;
  if (!path.empty() && fs::exists(path, error)) {
    const int64_t bytes = bytes_at(path);
    fs::remove_all(path, error);
    if (error) return io_error("cannot remove {}: {}", path, error.message());
    if (path.ends_with(".gguf"))
      fs::remove(fs::path(path).replace_extension("generation_config.json"), error);
    out.print("removed {} ({})\n", path, amount(bytes));
    return {};
  }
  FRESHET_ASSIGN_OR_RETURN(const auto ref, hub_model(o.model));
  if (!ref)
    return not_found("no model '{}' that freshet downloaded: freshet list shows them", o.model);
  FRESHET_ASSIGN_OR_RETURN(const hub::Settings settings, hub::Settings::from_environment());
  const auto freed = hub::Cache(settings.cache).remove(*ref);
  if (!freed.ok()) return freed.status();
  out.print("removed {} ({})\n", ref->text(), amount(*freed));
  return {};
}

// What the model needs in memory, from its configuration.
Status print_memory(const std::string& path, Output& out) {
  FRESHET_ASSIGN_OR_RETURN(const auto checkpoint, loader::Checkpoint::open(path));
  out.print("weights       {}\n", amount(static_cast<int64_t>(checkpoint.total_bytes())));
  FRESHET_ASSIGN_OR_RETURN(const ModelSpec spec, read_spec(checkpoint));
  const KvCacheSpec cache = kv_cache_spec(spec, ops::KvType::kF16);
  const auto per_token = static_cast<int64_t>(cache.bytes_per_token());
  out.print("architecture  {}, context {}\n", spec.architecture, spec.max_context);
  constexpr int64_t kShown = 4096;
  const int64_t tokens = std::min<int64_t>(kShown, spec.max_context);
  out.print("memory        about {} with {} tokens of context in F16\n",
            amount(static_cast<int64_t>(checkpoint.total_bytes()) + tokens * per_token +
                   static_cast<int64_t>(cache.state_bytes())),
            tokens);
  return {};
}

// What the hub offers of a model that is not here.
Status show_remote(const hub::ModelRef& ref, const hub::Settings& settings, Output& out) {
  const DownloadView view;
  hub::HubClient client(settings);
  FRESHET_ASSIGN_OR_RETURN(const hub::Listing listing,
                           hub::list_repo(client, ref, view.observer()));
  FRESHET_ASSIGN_OR_RETURN(const hub::Selection chosen,
                           hub::select_files(listing.files, ref.quant, ref.repo));
  out.print("commit        {}\n", listing.commit);
  if (!listing.licence.empty()) out.print("licence       {}\n", listing.licence);
  if (listing.gated)
    out.print("gated         accept the terms at {}/{}\n", settings.endpoint, ref.repo);
  for (const hub::RepoFile& m : hub::gguf_models(listing.files)) {
    const std::string quant = hub::quant_of(m.path);
    out.print("quant         {:10}  {:>9}  {}\n", quant.empty() ? "?" : quant,
              amount(hub::gguf_bytes(listing.files, m)), m.path);
  }
  out.print("download      {} ({})\n", amount(chosen.bytes()),
            chosen.gguf ? chosen.main : "safetensors");
  return {};
}

Status show(const Options& o, Output& out) {
  FRESHET_ASSIGN_OR_RETURN(const auto ref, hub_model(o.model));
  const bool here = std::filesystem::exists(o.model) || !local_model(o.model).empty();
  if (!ref || here) {
    FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(o.model));
    out.print("path          {}\n", path);
    return print_memory(path, out);
  }
  FRESHET_ASSIGN_OR_RETURN(const hub::Settings settings, hub::Settings::from_environment());
  out.print("source        {}/{}\n", settings.endpoint, ref->repo);
  const std::string known(hub::name_of_repo(ref->repo));
  if (const auto* entry = hub::find_in_catalogue(known))
    out.print("model         {} ({}), name {}\n", entry->about, entry->licence, entry->name);
  const auto model = hub::Cache(settings.cache).locate(*ref);
  if (!model) return show_remote(*ref, settings, out);
  out.print("commit        {}\n", model->commit);
  out.print("path          {}\n", model->path);
  for (const hub::RepoFile& f : model->selection.files)
    out.print("file          {:>9}  {}\n", amount(f.size), f.path);
  return print_memory(model->path, out);
}

}  // namespace models_command

namespace {

using ModelsAction = Status (*)(const models_command::Options&, Output&);

void run_models_command(CLI::App* c, const std::shared_ptr<models_command::Options>& o,
                        Context& context, Action& action, ModelsAction what) {
  c->callback([o, &context, &action, what] {
    action = [o, &context, what] { return what(*o, context.out); };
  });
}

constexpr char kHubModel[] = "A name of the catalogue, hf:ORG/REPO[@REVISION][:QUANT], or a URL";

}  // namespace

void accept_hub_option(const CLI::App& program, std::vector<std::string>& arguments) {
  const auto every = [](const CLI::App*) { return true; };
  const CLI::App* command = &program;
  for (size_t i = 0; i < arguments.size() && i < 2; ++i) {
    for (const CLI::App* next : command->get_subcommands(every)) {
      if (next->check_name(arguments[i])) command = next;
    }
  }
  const bool has_option = command->get_option_no_throw("--model") != nullptr;
  const auto spelled = [&](const std::string& repo) {
    const std::string name = hub::is_hub_name(repo) ? repo : "hf:" + repo;
    return has_option ? "--model=" + name : name;
  };
  constexpr std::string_view kWithValue = "--hf-repo=";
  for (size_t i = 0; i < arguments.size() && arguments[i] != "--"; ++i) {
    const std::string& a = arguments[i];
    if (a.starts_with(kWithValue)) {
      arguments[i] = spelled(a.substr(kWithValue.size()));
    } else if ((a == "-hf" || a == "-hfr" || a == "--hf-repo") && i + 1 < arguments.size()) {
      arguments[i] = spelled(arguments[i + 1]);
      arguments.erase(arguments.begin() + static_cast<std::ptrdiff_t>(i) + 1);
    }
  }
}

void add_pull(CLI::App& program, Context& context, Action& action) {
  auto o = std::make_shared<models_command::Options>();
  CLI::App* c = program.add_subcommand("pull", "Download a model, or update it");
  c->add_option("model", o->model, kHubModel)->required();
  c->add_option("--retries", o->retries, "Tries after a failure, without progress between them")
      ->check(CLI::Range(0, 1000))
      ->capture_default_str();
  add_examples(*c,
               "  freshet pull smollm2-360m\n"
               "  freshet pull qwen3-4b:Q8_0\n"
               "  freshet pull hf:Qwen/Qwen3-0.6B\n"
               "  freshet pull https://example.com/model.gguf");
  run_models_command(c, o, context, action, models_command::pull);
}

void add_list(CLI::App& program, Context& context, Action& action) {
  auto o = std::make_shared<models_command::Options>();
  CLI::App* c = program.add_subcommand("list", "List the models on this machine");
  c->alias("ls");
  c->add_flag("--catalogue,--catalog", o->catalogue, "List the names that pull knows");
  c->add_flag("--json", o->json, "Print a JSON array");
  run_models_command(c, o, context, action, models_command::list);
}

void add_rm(CLI::App& program, Context& context, Action& action) {
  auto o = std::make_shared<models_command::Options>();
  CLI::App* c = program.add_subcommand("rm", "Remove a downloaded model");
  c->add_option("model", o->model,
                "As in freshet list; without :QUANT, all files of the repository")
      ->required();
  add_examples(*c, "  freshet rm qwen3-4b:Q8_0\n  freshet rm hf:Qwen/Qwen3-0.6B");
  run_models_command(c, o, context, action, models_command::remove);
}

void add_show(CLI::App& program, Context& context, Action& action) {
  auto o = std::make_shared<models_command::Options>();
  CLI::App* c = program.add_subcommand(
      "show", "Show where a model comes from, its files and what memory it needs");
  c->add_option("model", o->model, std::string(kHubModel) + ", a folder or a file")->required();
  add_examples(*c, "  freshet show qwen3-0.6b\n  freshet show hf:Qwen/Qwen2.5-7B-Instruct-GGUF");
  run_models_command(c, o, context, action, models_command::show);
}

}  // namespace freshet::cli
