#!/usr/bin/env python3
"""Writes mechanisms.json: small tokenizers that between them use every part of a tokenizer.json, with
what Hugging Face tokenizers makes of some texts. Usage: golden_mechanisms.py OUT [TEXTS] [SEED]"""
import json
import random
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors

COUNT = int(sys.argv[2]) if len(sys.argv) > 2 else 12
RNG = random.Random(int(sys.argv[3]) if len(sys.argv) > 3 else 1)
ALPHABET = ["a", "b", "Zz", " ", "  ", "\n", "\r\n", "\t", "1", "23", "é", "e\u0301", "你", "好吗", "🙂", "'s", "'LL",
            ".", "!?", "_", "-", "ß", "İ", "ﬀ", "\u0301\u0323", "\u200d", "\u200b", "\u00a0", "\u3000", "ｶﾞ", "각", "\u1112\u1161\u11ab",
            "½", "²", "Ⅷ", "▁", "$", "+", "«", "”", "\u0000", "\u0085", "\ufeff", "\ufffd", "Ω", "Å", "ไทย", "नमस्ते", "ー", "ア", "あ",
            "д", "Ж", "<s>", "</s>", "[MASK]", "foo", "FOO", "food", "ⓐ", "\u2028", "ǅ", "ſ", "\u0130", "👩‍👩‍👧", "the", "hello"]
TEXTS = ["", " ", "  a  ", "Hello, World! 123", "hello  the\tfood\n", "I'm you'll DON'T", "naïve café ①②", "<s>foo</s> [MASK]x",
         "你好 world", "a\u0301\u0323b", "tHe quick brown fox", " lead", "trail ", "3.14 1,000"]


def texts():
    return TEXTS + ["".join(RNG.choice(ALPHABET) for _ in range(RNG.randint(1, 24))) for _ in range(COUNT)]


def pieces_of(normalizer, pre, cases):
    """Every word that the texts are cut into, so that a WordLevel model tells one from another."""
    words = {}
    for text in cases:
        text = normalizer.normalize_str(text) if normalizer else text
        for word, _ in pre.pre_tokenize_str(text) if pre else [(text, None)]:
            words.setdefault(word, len(words) + 1)
    return words


def build(name, normalizer=None, pre=None, decoder=None, post=None, added=(), model=None):
    cases = texts()
    if model is None:
        words = pieces_of(normalizer, pre, cases)
        model = models.WordLevel({"[UNK]": 0, **words}, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre:
        tokenizer.pre_tokenizer = pre
    if decoder:
        tokenizer.decoder = decoder
    for token in added:
        tokenizer.add_special_tokens([token]) if token.special else tokenizer.add_tokens([token])
    if post:
        tokenizer.post_processor = post(tokenizer)
    out = []
    for text in cases:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        out.append({"text": text, "ids": ids, "ids_with_special": tokenizer.encode(text).ids,
                    "decoded": tokenizer.decode(ids, skip_special_tokens=False),
                    "decoded_without_special": tokenizer.decode(ids, skip_special_tokens=True)})
    return {"name": name, "tokenizer": json.loads(tokenizer.to_str()), "cases": out}


def bpe(prefix="", suffix="", spaces="", **options):
    """A few merges over the characters of the alphabet (some are left out, to be unknown)."""
    vocab = {"<unk>": 0}
    chars = sorted({c for part in ALPHABET + TEXTS for c in part} - set("你Ж½🙂\u0130"))
    if options.get("byte_fallback"):
        for b in range(256):
            vocab[f"<0x{b:02X}>"] = len(vocab)
    for c in chars + ["▁", "Ġ"]:
        for form in {c, prefix + c, c + suffix, prefix + c + suffix}:
            vocab.setdefault(form, len(vocab))
    merges = []
    for word in ["the", "hello", "foo", "food", "hel", "lo", "▁the", "▁▁", "▁▁▁▁", "Ġthe", "aa", "b▁" if spaces else "ab"]:
        parts = [(prefix if i else "") + c + (suffix if i == len(word) - 1 else "") for i, c in enumerate(word)]
        while len(parts) > 1:
            i = RNG.randrange(len(parts) - 1)
            joined = parts[i] + parts[i + 1][len(prefix):]
            vocab.setdefault(joined, len(vocab))
            if (parts[i], parts[i + 1]) not in merges:
                merges.append((parts[i], parts[i + 1]))
            parts[i:i + 2] = [joined]
    if prefix:
        options["continuing_subword_prefix"] = prefix
    if suffix:
        options["end_of_word_suffix"] = suffix
    return models.BPE(vocab, merges, **options)


def unigram(byte_fallback=False):
    pieces = [("<unk>", 0.0)] + [(f"<0x{b:02X}>", 0.0) for b in range(256) if byte_fallback]
    words = ["▁", "a", "b", "h", "e", "l", "o", "t", "he", "ll", "lo", "the", "▁the", "▁hello", "hello", "foo", "d", "f", "oo", "1", "2", "3",
             "12", "é", "!", "▁▁", "\n", "Z", "z", "s", "'", "."]
    pieces += [(w, -RNG.randrange(1, 40) / 4.0) for w in words]
    return models.Unigram(pieces, 0, byte_fallback)


def wordpiece():
    words = ["[UNK]", "[CLS]", "[SEP]", "h", "##e", "##ello", "the", "##e", "foo", "##d", "##o", "a", "##a", "b", "##b", "1", "##2", "##3", "你", "!",
             ".", "'", "s", "ll", "cafe", "na", "##ive", "##z", "z"]
    vocab = {}
    for word in words:
        vocab.setdefault(word, len(vocab))
    return models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=12)


def all_tokenizers():
    n, p, d = normalizers, pre_tokenizers, decoders
    space = p.WhitespaceSplit()
    for form in (n.NFC(), n.NFD(), n.NFKC(), n.NFKD(), n.Lowercase(), n.Strip(), n.Strip(left=False), n.Strip(right=False), n.StripAccents(), n.Nmt(),
                 n.ByteLevel(), n.Prepend("▁"), n.Replace("a", "bb"), n.Replace(Regex(r"\s{2,}|[^\x00-\x7f]"), "-"), n.BertNormalizer(),
                 n.BertNormalizer(clean_text=False, lowercase=False, strip_accents=True),
                 n.BertNormalizer(handle_chinese_chars=False, lowercase=True, strip_accents=False),
                 n.Sequence([n.NFD(), n.StripAccents(), n.Lowercase()])):
        yield build(f"normalizer {form!r}"[:60], normalizer=form, pre=p.Split(Regex("[^a]+|a"), "isolated"))
    for pre in (p.Whitespace(), space, p.BertPreTokenizer(), p.Digits(True), p.Digits(False), p.Punctuation(), p.Punctuation("merged_with_previous"),
                p.Metaspace(), p.Metaspace(prepend_scheme="first"), p.Metaspace(prepend_scheme="never", split=False), p.Metaspace("_"),
                p.ByteLevel(), p.ByteLevel(add_prefix_space=False, use_regex=False), p.UnicodeScripts(), p.CharDelimiterSplit("a"),
                p.Sequence([p.Punctuation(), p.Metaspace(prepend_scheme="first")]),
                p.Sequence([space, p.Digits(True), p.Punctuation("contiguous")]), p.FixedLength(3)):
        yield build(f"pre {pre!r}"[:60], pre=pre)
    for behavior in ("removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"):
        for invert in (False, True):
            yield build(f"split {behavior} {invert}", pre=p.Split(Regex(r"[a-z]+|(?=\d)"), behavior, invert))
            yield build(f"split a {behavior} {invert}", pre=p.Split("a", behavior, invert))
    for pattern in (r"\s+", r"^.", r".$", r"(?i:foo|'s)", r"\h+", r"[\p{L}&&[^a-z]]+|[^\p{L}]", r"[a[bc]]+", r"\W+", r"[^\S\n]+", r"\p{Han}+|\p{Lu}|\u0301",
                    r"\d{1,3}(?=(?:\d{3})*\b)", r"[[:digit:][:space:]]?[[:punct:]]+", r"(?<=a)b", r"\bfoo\b"):
        yield build(f"regex {pattern}", pre=p.Split(Regex(pattern), "isolated"))
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
    folded, lead, spaces = "(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?", r"\s*[\r\n]+|\s+(?!\S)|\s+"
    other = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    for name, pattern in (  # what published vocabularies split with
            ("kimi", r"[\p{Han}]+|" + lead + upper + "*" + lower + "+" + folded + "?|" + lead + upper + "+" + lower + "*" + folded + r"?|\p{N}{1,3}" + other + spaces),
            ("deepseek", r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + spaces),
            ("bailing", "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"),
            ("exaone", folded + "|" + lead + r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"),
            ("jais", folded + "|" + lead + r"\p{L}+|\p{N}{1,3}" + other + r"\s*[\r\n]+|\s{4}(?!\S)|\s{1,2}(?!\S)|\s"),
            ("bloom", r" ?[^(\s|[.,!?…。，、।۔،])]+"), ("poro", r" ?[^(\s|.,!?…。，、।۔،)]+"),
            ("llama3", folded + "|" + lead + r"\p{L}+|\p{N}{1,3}" + other + spaces),
            ("qwen35", folded + "|" + lead + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + spaces),
            ("o200k", (lead + upper + "*" + lower + "+" + folded + "?|" + lead + upper + "+" + lower + "*" + folded + "?").replace("&&[^\\p{Han}]", "")
             + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + spaces)):
        yield build(f"words {name}", pre=p.Split(Regex(pattern), "isolated"))
    special = lambda content, **k: AddedToken(content, special=True, normalized=k.pop("normalized", False), **k)
    added = [special("<s>"), special("</s>"), special("[MASK]", lstrip=True, rstrip=True), AddedToken("foo", single_word=True, normalized=False),
             AddedToken("HELLO", normalized=True), AddedToken("\n", rstrip=True), AddedToken("  ", normalized=False), AddedToken("ab", lstrip=True)]
    yield build("added", normalizer=n.Lowercase(), pre=space, added=added, decoder=d.WordPiece())
    yield build("added and metaspace", pre=p.Metaspace(prepend_scheme="first"), added=added, decoder=d.Metaspace(prepend_scheme="first"))
    template = lambda t: processors.Sequence([processors.ByteLevel(), processors.TemplateProcessing(
        single="<s> </s> $A </s>", special_tokens=[("<s>", t.token_to_id("<s>")), ("</s>", t.token_to_id("</s>"))])])
    yield build("template", pre=space, added=added, post=template)
    yield build("bert", normalizer=n.BertNormalizer(), pre=p.BertPreTokenizer(), model=wordpiece(), decoder=d.WordPiece(),
                post=lambda t: processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1)))
    yield build("wordpiece", pre=p.Whitespace(), model=wordpiece(), decoder=d.WordPiece(prefix="##", cleanup=False))
    metaspace = p.Metaspace(prepend_scheme="first", split=False)
    llama = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)])
    yield build("unigram", pre=p.Metaspace(), model=unigram(), decoder=d.Metaspace())
    yield build("unigram with bytes", pre=metaspace, model=unigram(True), decoder=llama)
    yield build("bpe", pre=p.Metaspace(), model=bpe(unk_token="<unk>"), decoder=d.Metaspace())
    yield build("bpe fused", pre=p.Metaspace(), model=bpe(unk_token="<unk>", fuse_unk=True), decoder=d.Metaspace())
    yield build("bpe without unknown", pre=p.Metaspace(), model=bpe(), decoder=d.Fuse())
    yield build("bpe ignore merges", pre=p.Metaspace(), model=bpe(ignore_merges=True, unk_token="<unk>"))
    yield build("bpe prefix", pre=p.Whitespace(), model=bpe(prefix="##", unk_token="<unk>"), decoder=d.WordPiece())
    yield build("bpe suffix", pre=p.Whitespace(), model=bpe(suffix="</w>", unk_token="<unk>"), decoder=d.BPEDecoder())
    for options in ({}, {"spaces": "x"}):
        yield build(f"bpe bytes {options}", pre=metaspace, model=bpe(byte_fallback=True, unk_token="<unk>", fuse_unk=True, **options), decoder=llama)
    yield build("bpe all", normalizer=n.Sequence([n.Prepend("▁"), n.Replace(" ", "▁")]), added=added,
                model=bpe(byte_fallback=True, unk_token="<unk>", fuse_unk=True), decoder=llama)
    level = {c: i for i, c in enumerate(sorted(p.ByteLevel.alphabet()))}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "t"), ("Ġ", "Ġ"), ("Ã", "©"), ("Ġt", "he"), ("ĠĠ", "ĠĠ")]
    for left, right in merges:
        level.setdefault(left + right, len(level))
    byte_bpe = lambda: models.BPE(dict(level), list(merges))
    yield build("byte level", pre=p.ByteLevel(), model=byte_bpe(), decoder=d.ByteLevel(), added=added)
    yield build("byte level after split", pre=p.Sequence([p.Split(Regex(r"\p{N}{1,3}"), "isolated"), p.ByteLevel(False, use_regex=False)]),
                model=byte_bpe(), decoder=d.ByteLevel())
    yield build("byte level before digits", pre=p.Sequence([p.ByteLevel(False), p.Digits(True)]), model=byte_bpe(), decoder=d.ByteLevel())
    yield build("byte level normalizer", normalizer=n.ByteLevel(), pre=p.Split(Regex("Ġ?[a-z]+"), "isolated"), model=byte_bpe(),
                decoder=d.Sequence([d.ByteLevel(), d.Strip(" ", 1, 0), d.Replace("th", "TH")]))
    yield build("ctc", pre=p.Whitespace(), decoder=d.CTC(pad_token="a", word_delimiter_token="b"))
    yield build("strip each", pre=space, decoder=d.Sequence([d.Strip("a", 2, 0), d.Replace(Regex("[0-9]"), "#"), d.Fuse()]))


if __name__ == "__main__":
    with open(sys.argv[1], "w", encoding="utf-8") as out:
        json.dump(list(all_tokenizers()), out, ensure_ascii=False, separators=(",", ":"))
