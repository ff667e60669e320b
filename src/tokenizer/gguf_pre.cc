// The word patterns for tokenizer.ggml.pre. Each name stands for the expressions in the
// tokenizer.json of one model family.
#include <algorithm>
#include <array>

#include "tokenizer/gguf_vocab.h"
#include "tokenizer/scanner.h"

namespace freshet::tokenizer {
namespace {

using Words = ScanRules::Words;
using Contractions = ScanRules::Contractions;

std::string cl100k(uint32_t digits, Contractions contractions = Contractions::kAnyCase) {
  return pattern_for_rules({Words::kCl100k, contractions, digits});
}
std::string o200k(uint32_t digits, Contractions contractions) {
  return pattern_for_rules({Words::kO200k, contractions, digits, false, true});
}
std::string gpt2() {
  return pattern_for_rules({});
}

constexpr std::string_view kFolded = "(?i:'s|'t|'re|'ve|'m|'ll|'d)";
constexpr std::string_view kHanKana = "[一-龥぀-ゟ゠-ヿ]+";
constexpr std::string_view kDeepseekWords =
    R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+)"
    R"(| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kBloomWords = " ?[^(\\s|.,!?…。，、।۔،)]+";
// The letters of the cased scripts, as DeepSeek LLM lists them.
constexpr std::string_view kCasedLetters =
    "A-Za-z\\x{B5}\\x{C0}-\\x{D6}\\x{D8}-\\x{F6}\\x{F8}-\\x{1BA}\\x{1BC}-\\x{1BF}"
    "\\x{1C4}-\\x{293}\\x{295}-\\x{2AF}\\x{370}-\\x{373}\\x{376}\\x{377}\\x{37B}-\\x{37D}\\x{37F}"
    "\\x{386}\\x{388}-\\x{38A}\\x{38C}\\x{38E}-\\x{3A1}\\x{3A3}-\\x{3F5}\\x{3F7}-\\x{481}"
    "\\x{48A}-\\x{52F}\\x{531}-\\x{556}\\x{10A0}-\\x{10C5}\\x{13A0}-\\x{13F5}\\x{13F8}-\\x{13FD}"
    "\\x{1C90}-\\x{1CBA}\\x{1CBD}-\\x{1CBF}\\x{1D00}-\\x{1D2B}\\x{1D6B}-\\x{1D77}"
    "\\x{1D79}-\\x{1D9A}\\x{1E00}-\\x{1F15}\\x{1F18}-\\x{1F1D}\\x{1F20}-\\x{1F45}"
    "\\x{1F48}-\\x{1F4D}\\x{1F50}-\\x{1F57}\\x{1F59}\\x{1F5B}\\x{1F5D}\\x{1F5F}-\\x{1F7D}"
    "\\x{1F80}-\\x{1FB4}\\x{1FB6}-\\x{1FBC}\\x{1FBE}\\x{1FC2}-\\x{1FC4}\\x{1FC6}-\\x{1FCC}"
    "\\x{1FD0}-\\x{1FD3}\\x{1FD6}-\\x{1FDB}\\x{1FE0}-\\x{1FEC}\\x{1FF2}-\\x{1FF4}"
    "\\x{1FF6}-\\x{1FFC}\\x{2102}\\x{2107}\\x{210A}-\\x{2113}\\x{2115}\\x{2119}-\\x{211D}"
    "\\x{2124}\\x{2126}\\x{2128}\\x{212A}-\\x{212D}\\x{212F}-\\x{2134}\\x{2139}"
    "\\x{213C}-\\x{213F}\\x{2145}-\\x{2149}\\x{214E}\\x{2183}\\x{2184}\\x{2C00}-\\x{2C7B}"
    "\\x{2C7E}-\\x{2CE4}\\x{2CEB}-\\x{2CEE}\\x{2CF2}\\x{2CF3}\\x{A640}-\\x{A66D}"
    "\\x{A680}-\\x{A69B}\\x{A722}-\\x{A76F}\\x{A771}-\\x{A787}\\x{A78B}-\\x{A78E}"
    "\\x{AB70}-\\x{ABBF}\\x{FB00}-\\x{FB06}\\x{FB13}-\\x{FB17}\\x{FF21}-\\x{FF3A}"
    "\\x{FF41}-\\x{FF5A}\\x{10400}-\\x{1044F}\\x{104B0}-\\x{104D3}\\x{104D8}-\\x{104FB}"
    "\\x{10C80}-\\x{10CB2}\\x{10CC0}-\\x{10CF2}\\x{118A0}-\\x{118DF}\\x{1E900}-\\x{1E943}";

std::string kimi() {
  const std::string upper = R"([\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]])";
  const std::string lower = R"([\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]])";
  const std::string lead = R"([^\r\n\p{L}\p{N}]?)";
  const std::string end = std::string(kFolded) + "?|";
  return R"([\p{Han}]+|)" + lead + upper + "*" + lower + "+" + end + lead + upper + "+" + lower +
         "*" + end + R"(\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
}

struct Row {
  std::vector<std::string_view> names;
  GgufPre pre;
};

std::vector<Row> gpt2_rows() {
  return {
      {{"gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "jina-es",
        "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum", "modern-bert",
        "exaone4", "jina-v1-en", "jina-v2-code", "roberta-bpe"},
       {.patterns = {gpt2()}}},
      {{"starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b",
        "mellum2"},
       {.patterns = {"\\p{N}", gpt2()}}},
      {{"default", ""},
       {.patterns = {R"([\p{P}\$\+<=>\^~\|]+)", gpt2(), "\\p{N}+", "[0-9][0-9][0-9]"}}},
      {{"falcon"}, {.patterns = {R"([\p{P}\$\+<=>\^~\|`]+)", gpt2(), "[0-9][0-9][0-9]"}}},
      {{"chameleon"},
       {.patterns = {"<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                     "([\\t\\n]|    |  )", "\\p{N}", "[\\p{P}!-/:-@\\[-`{-~]", gpt2()},
        .add_bos = true}},
      {{"poro-chat", "bloom", "gpt3-finnish"}, {.patterns = {std::string(kBloomWords)}}},
      {{"viking"}, {.patterns = {std::string(kBloomWords), "\\p{N}"}}},
      {{"superbpe"}, {.patterns = {"\\p{N}+", "(?=(\\d{3})+(?!\\d))"}}},
  };
}

std::vector<Row> cl100k_rows() {
  const std::string spaces = "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
  const std::string words = "[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|";
  const std::string other = "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|";
  const std::string folded = std::string(kFolded) + "|";
  std::string halves;
  for (const char* n : {"512", "256", "128", "64", "32", "16", "8", "4", "1,2"}) {
    halves += std::string("\\s{") + n + "}(?!\\S)|";
  }
  return {
      {{"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
        "jina-v5-nano"},
       {.patterns = {cl100k(3)}, .ignore_merges = true, .add_bos = true}},
      {{"dbrx", "smaug-bpe", "glm4", "chatglm-bpe"}, {.patterns = {cl100k(3)}}},
      {{"qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "stablelm2", "hunyuan", "solar-open",
        "megrez", "grok-2"},
       {.patterns = {cl100k(1)}}},
      {{"qwen35"},
       {.patterns = {pattern_for_rules({Words::kCl100k, Contractions::kAnyCase, 1, true})}}},
      {{"ufakzeka"}, {.patterns = {cl100k(1, Contractions::kNone)}}},
      {{"laguna"}, {.patterns = {"[^\\n]+|[\\n]+", cl100k(1)}}},
      {{"minicpm5"}, {.patterns = {"\\p{N}{1,3}", cl100k(0)}, .ignore_merges = true}},
      {{"jais-2"},
       {.patterns = {folded + words + "\\p{N}{1,3}" + other + "\\s*[\\r\\n]+|" + halves + "\\s"}}},
      {{"bailingmoe", "bailingmoe2", "llada-moe"},
       {.patterns = {"'(?i:[sdmt]|ll|ve|re)|" + words + "\\p{N}" + other +
                     "\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"}}},
      {{"seed-coder"},
       {.patterns = {folded + words + "\\p{N}| ?[^\\s\\p{L}\\p{N}\\r\\n]+|" + spaces}}},
      {{"exaone-moe"},
       {.patterns = {folded + "[^\\r\\n\\p{L}\\p{N}]?(?:\\p{L}\\p{M}*(?: \\p{L}\\p{M}*)*)+|\\p{N}|"
                              " ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]?|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"}}},
  };
}

std::vector<Row> other_rows() {
  const std::string deepseek(kDeepseekWords), han_kana(kHanKana);
  const std::string marks = "[^\\n]+|[\\n]+";
  std::string spark = deepseek;
  spark.replace(spark.find("[\\r\\n]*|\\s*[\\r\\n]+"), 18, "|[\\r\\n]");
  return {
      {{"tekken"},
       {.patterns = {o200k(1, Contractions::kNone)}, .ignore_merges = true, .add_bos = true}},
      {{"gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"},
       {.patterns = {o200k(3, Contractions::kAnyCase)}}},
      {{"granite-embed-multi-97m"},
       {.patterns = {o200k(3, Contractions::kAnyCase)}, .ignore_merges = true}},
      {{"tiny_aya", "cohere2moe"},
       {.patterns = {"\\d{1,3}(?=(?:\\d{3})*\\b)", o200k(3, Contractions::kAnyCase)}}},
      {{"youtu"},
       {.patterns = {"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-"
                     "龥぀-"
                     "ゟ゠-"
                     "ヿ]"
                     "+",
                     o200k(1, Contractions::kAnyCase)},
        .ignore_merges = true}},
      {{"kimi-k2"}, {.patterns = {kimi()}}},
      {{"deepseek-llm"},
       {.patterns = {"[\\r\\n]", "\\s?[" + std::string(kCasedLetters) + "]+",
                     "\\s?[!-/:-~！-／：-～‘-‟　-。]+", "\\s+$", "[一-龥ࠀ-一가-퟿]+",
                     "\\p{N}+"}}},
      {{"deepseek-coder"},
       {.patterns = {"[\\r\\n]", "\\s?\\p{L}+", "\\s?\\p{P}+", "[一-龥ࠀ-一가-퟿]+",
                     "\\p{N}"}}},
      {{"deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"},
       {.patterns = {"\\p{N}{1,3}", han_kana, deepseek}}},
      {{"spark2_5"}, {.patterns = {"\\p{N}{1,3}", han_kana, spark, "\\p{N}"}}},
      {{"afmoe"},
       {.patterns =
            {"\\d{1,3}(?=(?:\\d{3})*(?!\\d))",
             "[一-鿿㐀-䶿\\x{F900}-\\x{FAFF}぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-"
             "៿က-"
             "႟ꩠ-"
             "ꩿꧠ-"
             "꧿가-힯ᄀ-ᇿ]+",
             deepseek}}},
      {{"gemma4", "granite-embed-multi-311m"},
       {.patterns = {marks}, .add_bos = true, .marked_spaces = true, .whole_newlines = true}},
      {{"sarvam-moe"}, {.patterns = {marks}, .marked_spaces = true}},
  };
}

}  // namespace

std::optional<GgufPre> find_gguf_pre(std::string_view name) {
  for (const auto& rows : {gpt2_rows(), cl100k_rows(), other_rows()}) {
    for (const Row& row : rows) {
      if (std::find(row.names.begin(), row.names.end(), name) != row.names.end()) return row.pre;
    }
  }
  return std::nullopt;
}

}  // namespace freshet::tokenizer
