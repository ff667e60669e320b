"""The same tokens and log-probabilities with every drafter as without one, to the bit.

usage: equality_test.py [Class[.test] ...]   needs FRESHET (the program) and
FRESHET_UNPACKED_DATA (the build's tests/data)

The golden models are tiny and random, so heads of random weights are made here: what they propose is
wrong nearly always. A model that drafts for itself is right whenever it is greedy. FRESHET_SPECULATION_FULL=1
runs every model with every setting instead of a sample; FRESHET_SPECULATION_DEVICE=cuda runs them on a GPU.
"""
import json
import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

FRESHET = os.environ.get("FRESHET", "build/release/bin/freshet")
DEVICE = os.environ.get("FRESHET_SPECULATION_DEVICE")
FULL = os.environ.get("FRESHET_SPECULATION_FULL") == "1"
UNPACKED = os.environ.get("FRESHET_UNPACKED_DATA", "build/release/tests/data")
GOLDEN = os.path.join(UNPACKED, "golden")
MODELS = sorted(os.listdir(GOLDEN))
GREEDY = ["--temp", "0", "--logprobs", "2"]
SAMPLED = ["--temp", "0.9", "--top-p", "0.95", "--seed", "7", "--logprobs", "1"]
PENALISED = ["--temp", "1.3", "--seed", "3", "--repetition-penalty", "1.3", "--frequency-penalty", "0.4",
             "--min-tokens", "5"]


def config_of(model):
    with open(os.path.join(GOLDEN, model, "config.json"), encoding="utf8") as f:
        return json.load(f)


def size_of(config, *keys, default=None):
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    return default


def write_safetensors(path, tensors, seed, scale=lambda name: 0.1):
    """tensors: name -> shape; BF16 of random numbers up to scale(name), norms are ones."""
    rng = random.Random(seed)
    header, at = {}, 0
    blobs = []
    for name, shape in tensors.items():
        count = 1
        for n in shape:
            count *= n
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + 2 * count]}
        at += 2 * count
        norm, most = "norm" in name, scale(name)
        blobs.append(b"".join(
            struct.pack("<f", 1.0 if norm else rng.uniform(-most, most))[2:] for _ in range(count)))
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(blobs))


class Shape:
    """What a head of a golden model has to fit."""

    def __init__(self, model):
        c = config_of(model)
        self.hidden = size_of(c, "n_embd", "hidden_size")
        self.heads = size_of(c, "n_head", "num_attention_heads")
        self.kv_heads = size_of(c, "num_key_value_heads", default=self.heads)
        self.head_dim = size_of(c, "head_dim", default=self.hidden // self.heads)
        self.layers = size_of(c, "n_layer", "num_hidden_layers")
        self.vocab = c["vocab_size"]
        self.ff = 2 * self.hidden

    def layer(self, prefix, width):
        q, k = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {prefix + "self_attn.q_proj.weight": [q, width], prefix + "self_attn.k_proj.weight": [k, width],
                prefix + "self_attn.v_proj.weight": [k, width], prefix + "self_attn.o_proj.weight": [self.hidden, q],
                prefix + "mlp.gate_proj.weight": [self.ff, self.hidden],
                prefix + "mlp.up_proj.weight": [self.ff, self.hidden],
                prefix + "mlp.down_proj.weight": [self.hidden, self.ff],
                prefix + "post_attention_layernorm.weight": [self.hidden]}

    def config(self, **more):
        return {"model_type": "llama", "hidden_size": self.hidden, "intermediate_size": self.ff,
                "num_hidden_layers": 1, "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
                "vocab_size": self.vocab, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, **more}


def save_folder(folder, config, tensors, seed, **how):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf8") as f:
        json.dump(config, f)
    write_safetensors(os.path.join(folder, "model.safetensors"), tensors, seed, **how)
    return folder


def eagle(folder, s):
    return save_folder(os.path.join(folder, "eagle"), s.config(),
                       {"fc.weight": [s.hidden, 2 * s.hidden], **s.layer("layers.0.", s.hidden)}, 1)


def eagle3(folder, s, boundaries=(0, 1)):
    h = s.hidden
    tensors = {"fc.weight": [h, len(boundaries) * h], "midlayer.hidden_norm.weight": [h],
               "midlayer.input_layernorm.weight": [h], "norm.weight": [h], "lm_head.weight": [s.vocab, h],
               **s.layer("midlayer.", 2 * h)}
    config = s.config(eagle_config={"eagle_aux_hidden_state_layer_ids": list(boundaries)})
    return save_folder(os.path.join(folder, "eagle3"), config, tensors, 2)


def p_eagle(folder, s):
    h = s.hidden
    tensors = {"fc.weight": [h, 2 * h], "layers.0.hidden_norm.weight": [h], "norm.weight": [h],
               "lm_head.weight": [s.vocab, h], "mask_hidden": [1, 2 * h], "embed_tokens.weight": [s.vocab + 1, h]}
    for i in range(3):
        tensors.update({**s.layer(f"layers.{i}.", h if i else 2 * h), f"layers.{i}.input_layernorm.weight": [h]})
    config = s.config(eagle_aux_hidden_state_layer_ids=[0, 1], ptd_token_id=s.vocab)
    return save_folder(os.path.join(folder, "p-eagle"), {**config, "num_hidden_layers": 3}, tensors, 6)


def dflash(folder, s, **more):
    h = s.hidden
    tensors = {"fc.weight": [h, 2 * h], "hidden_norm.weight": [h], "norm.weight": [h]}
    for i in range(2):
        tensors.update({**s.layer(f"layers.{i}.", h), f"layers.{i}.input_layernorm.weight": [h]})
    config = {**s.config(aux_hidden_state_layer_ids=[0, 1]), "num_hidden_layers": 2,
              "speculators_model_type": "dflash", "block_size": 6, "mask_token_id": 3, **more}
    return save_folder(os.path.join(folder, "dflash"), config, tensors, 7)


def medusa(folder, s):
    path = os.path.join(folder, "medusa.safetensors")
    tensors = {}
    for i in range(3):
        tensors[f"blocks.{i}.weight"] = [s.hidden, s.hidden]
        tensors[f"blocks.{i}.bias"] = [s.hidden]
    write_safetensors(path, tensors, 3)
    return path


def llama_whose_last_layers_do_nothing(folder, layers, active):
    """A model of random weights, whose layers behind the first `active` ones add zeros."""
    h, ff, vocab = 64, 128, 256
    tensors = {"model.embed_tokens.weight": [vocab, h], "model.norm.weight": [h], "lm_head.weight": [vocab, h]}
    for i in range(layers):
        p = f"model.layers.{i}."
        tensors.update({p + "input_layernorm.weight": [h], p + "post_attention_layernorm.weight": [h],
                        **{f"{p}self_attn.{x}_proj.weight": [h, h] for x in "qkvo"},
                        p + "mlp.gate_proj.weight": [ff, h], p + "mlp.up_proj.weight": [ff, h],
                        p + "mlp.down_proj.weight": [h, ff]})

    def scale(name):
        layer = int(name.split(".")[2]) if "layers" in name else -1
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            return 0.0 if layer >= active else 1.0
        return 0.3
    config = {"model_type": "llama", "hidden_size": h, "intermediate_size": ff, "num_hidden_layers": layers,
              "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": vocab,
              "max_position_embeddings": 512, "rms_norm_eps": 1e-5}
    return save_folder(folder, config, tensors, 4, scale=scale)


def qwen3_next_mtp(folder, c):
    """An MTP layer for a Qwen3-Next with this config."""
    h, ff, shared = c["hidden_size"], c["moe_intermediate_size"], c["shared_expert_intermediate_size"]
    d = c["head_dim"]
    q, k, p = c["num_attention_heads"] * d, c["num_key_value_heads"] * d, "mtp.layers.0."
    tensors = {"mtp.fc.weight": [h, 2 * h], "mtp.pre_fc_norm_embedding.weight": [h],
               "mtp.pre_fc_norm_hidden.weight": [h], "mtp.norm.weight": [h], p + "input_layernorm.weight": [h],
               p + "post_attention_layernorm.weight": [h], p + "self_attn.q_proj.weight": [2 * q, h],
               p + "self_attn.k_proj.weight": [k, h], p + "self_attn.v_proj.weight": [k, h],
               p + "self_attn.o_proj.weight": [h, q], p + "self_attn.q_norm.weight": [d],
               p + "self_attn.k_norm.weight": [d], p + "mlp.gate.weight": [c["num_experts"], h],
               p + "mlp.shared_expert_gate.weight": [1, h]}
    for mlp, size in [("shared_expert", shared)] + [(f"experts.{e}", ff) for e in range(c["num_experts"])]:
        tensors.update({f"{p}mlp.{mlp}.gate_proj.weight": [size, h], f"{p}mlp.{mlp}.up_proj.weight": [size, h],
                        f"{p}mlp.{mlp}.down_proj.weight": [h, size]})
    path = os.path.join(folder, "mtp.safetensors")
    write_safetensors(path, tensors, 5)
    return path


def prompts_of(vocab, seed=5):
    rng = random.Random(seed)
    lists = [[rng.randrange(3, vocab) for _ in range(n)] for n in (3, 21, 50)]
    lists.append(lists[1][:10] * 4)  # repeats itself: n-grams are found
    lists.append(list(lists[1]))     # its prefix is in the cache
    return lists


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, name):
        return os.path.join(self.folder, name)

    def run_program(self, *arguments):
        return subprocess.run([FRESHET, *arguments], capture_output=True, text=True, timeout=300, check=False)

    def outputs(self, model, lists, options, config=None):
        ids = self.path("ids.json")
        with open(ids, "w", encoding="utf8") as f:
            json.dump(lists, f)
        arguments = ["run", os.path.join(GOLDEN, model), "--ids", ids, "-n", "20", "--json", "-t", "2",
                     *options]
        if DEVICE:
            arguments += ["--device", DEVICE]
        if config:
            arguments += ["--speculative-config", json.dumps(config)]
        done = self.run_program(*arguments)
        self.assertEqual(done.returncode, 0, f"{model} {config}: {done.stderr}")
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        lines.sort(key=lambda line: (line["prompt_index"], line["sample"]))
        drafted = sum(line.pop("drafted_tokens", 0) for line in lines)
        accepted = sum(line.pop("accepted_tokens", 0) for line in lines)
        return lines, drafted, accepted

    def check(self, model, options, configs, lists=None):
        lists = lists or prompts_of(Shape(model).vocab)
        want, _, _ = self.outputs(model, lists, options)
        counts = []
        for config in configs:
            got, drafted, accepted = self.outputs(model, lists, options, config)
            self.assertEqual(got, want, f"{model} {options} {config}")
            counts.append((drafted, accepted))
        return counts


class Equality(Case):
    def test_every_model_drafts_by_itself(self):
        """n-grams, the first layer, and the model as its own draft model."""
        for number, model in enumerate(MODELS):
            settings = [GREEDY, SAMPLED, PENALISED] if FULL else [(GREEDY, SAMPLED, PENALISED)[number % 3]]
            own = os.path.join(GOLDEN, model)
            for options in settings:
                with self.subTest(model=model, options=options):
                    counts = self.check(model, options, [
                        {"method": "ngram", "num_speculative_tokens": 5},
                        {"method": "early_exit", "exit_layer": 1, "num_speculative_tokens": 4},
                        {"method": "draft_model", "model": own, "num_speculative_tokens": 4}])
                    drafted, accepted = counts[2]
                    self.assertGreater(drafted, 0)
                    if options is GREEDY:
                        self.assertEqual(accepted, drafted, "a model agrees with itself")

    def test_settings(self):
        model = "llama"
        s = Shape(model)
        configs = [{"method": "draft_model", "model": os.path.join(GOLDEN, model), "num_speculative_tokens": 7},
                   {"method": "eagle", "model": eagle(self.folder, s), "num_speculative_tokens": 2},
                   {"method": "ngram"}]
        for options in (["--temp", "1", "--seed", "1", "--samples", "3", "--logprobs", "0"],
                        ["--temp", "0", "--kv-cache-dtype", "int8"], ["--temp", "0", "--kv-cache-dtype", "fp8"],
                        ["--temp", "0", "--reference"], ["--temp", "0.7", "--seed", "4", "--cpu-isa", "avx2"],
                        ["--temp", "0.7", "--seed", "4", "--cpu-isa", "scalar"],
                        ["--temp", "0", "--max-model-len", "64"],
                        ["--temp", "0", "--kv-cache-memory", "256K", "--max-model-len", "128"]):
            with self.subTest(options=options):
                self.check(model, options, configs)


class Heads(Case):
    def test_random_heads_change_nothing(self):
        for number, model in enumerate(MODELS):
            s = Shape(model)
            if s.layers < 2:
                continue
            settings = [GREEDY, SAMPLED] if FULL else [(SAMPLED, GREEDY)[number % 2]]
            configs = [{"method": "eagle", "model": eagle(self.folder, s), "num_speculative_tokens": 3},
                       {"method": "eagle3", "model": eagle3(self.folder, s), "num_speculative_tokens": 3},
                       {"method": "medusa", "model": medusa(self.folder, s), "num_speculative_tokens": 3}]
            for options in settings:
                with self.subTest(model=model, options=options):
                    for drafted, _ in self.check(model, options, configs):
                        self.assertGreater(drafted, 0)

    def test_mtp_of_qwen3_next(self):
        path = os.path.join(UNPACKED, "seeded/qwen3-next")
        with open(os.path.join(path, "config.json"), encoding="utf8") as f:
            c = json.load(f)
        config = {"method": "mtp", "model": qwen3_next_mtp(self.folder, c), "num_speculative_tokens": 3}
        for options in (GREEDY, SAMPLED, PENALISED):
            with self.subTest(options=options):
                (drafted, _), = self.check(path, options, [config], prompts_of(c["vocab_size"]))
                self.assertGreater(drafted, 0)


class Combined(Case):
    """Several drafters at once: each sequence gets the draft that is expected to give the most."""

    def test_they_change_nothing(self):
        for number, model in enumerate(MODELS if FULL else MODELS[::4]):
            s = Shape(model)
            own = os.path.join(GOLDEN, model)
            configs = [{"method": ["suffix", "ngram"]},
                       {"method": ["ngram", "draft_model"], "model": own, "num_speculative_tokens": 4},
                       {"method": ["ngram", "draft_model", "suffix"], "model": own}]
            if s.layers >= 2:
                configs += [{"method": ["eagle3", "ngram"], "model": eagle3(self.folder, s)},
                            {"method": ["suffix", "early_exit"], "num_speculative_tokens": 3}]
            for options in [GREEDY, SAMPLED, PENALISED] if FULL else [(SAMPLED, GREEDY, PENALISED)[number % 3]]:
                with self.subTest(model=model, options=options):
                    counts = self.check(model, options, configs)
                    self.assertGreater(counts[1][0], 0)
                    if options is GREEDY:  # the model agrees with itself
                        self.assertGreater(counts[1][1], counts[1][0] / 2)

    def test_trees_and_rules(self):
        own = os.path.join(GOLDEN, "llama")
        base = {"method": ["ngram", "draft_model"], "model": own, "num_speculative_tokens": 4}
        self.check("llama", SAMPLED, [{**base, "tree_nodes": 8, "tree_max_batch": 64}])
        for rule in ("rejection", "block"):
            self.check("llama", GREEDY, [{**base, "rejection_sample_method": rule}])


class Parallel(Case):
    def test_a_draft_model_with_masks(self):
        """All drafts from one pass: the first is the model's own next token."""
        model = "llama"
        own = os.path.join(GOLDEN, model)
        folder = self.path("pard")
        os.mkdir(folder)
        for name in os.listdir(own):
            if name != "config.json":
                os.symlink(os.path.abspath(os.path.join(own, name)), os.path.join(folder, name))
        with open(os.path.join(folder, "config.json"), "w", encoding="utf8") as f:
            json.dump({**config_of(model), "pard_token": 7}, f)
        base = {"method": "draft_model", "model": folder, "parallel_drafting": True}
        for options in (GREEDY, SAMPLED, PENALISED):
            with self.subTest(options=options):
                (drafted, accepted), _, _ = self.check(
                    model, options, [{**base, "num_speculative_tokens": 4}, base,
                                     {**base, "method": ["ngram", "draft_model"], "num_speculative_tokens": 3}])
                self.assertGreater(drafted, 0)
                if options is GREEDY:
                    self.assertGreaterEqual(accepted, drafted / 4)
        self.check(model, SAMPLED + ["--samples", "3"], [{**base, "num_speculative_tokens": 4}])
        for rule in ("rejection", "block"):
            self.check(model, GREEDY, [{**base, "num_speculative_tokens": 3, "rejection_sample_method": rule}])


    def test_a_head_with_masks(self):
        """P-EAGLE: three layers, and rows of a mask token behind the target's vocabulary."""
        head = p_eagle(self.folder, Shape("llama"))
        base = {"method": "eagle3", "model": head, "parallel_drafting": True}
        for options in (GREEDY, SAMPLED, PENALISED):
            with self.subTest(options=options):
                for drafted, _ in self.check("llama", options, [{**base, "num_speculative_tokens": 4}, base]):
                    self.assertGreater(drafted, 0)
        self.check("llama", GREEDY, [{**base, "num_speculative_tokens": 3, "rejection_sample_method": "rejection"}])


class DFlash(Case):
    """Blocks of masks that see one another, and the target's states as keys and values."""

    def test_blocks_change_nothing(self):
        models = [m for m in MODELS if Shape(m).layers >= 2]
        for number, model in enumerate(models if FULL else models[::5]):
            base = {"method": "dflash", "model": dflash(self.folder, Shape(model))}
            configs = [{**base, "num_speculative_tokens": 5}, base, {**base, "method": ["ngram", "dflash"]}]
            for options in [GREEDY, SAMPLED, PENALISED] if FULL else [(GREEDY, SAMPLED, PENALISED)[number % 3]]:
                with self.subTest(model=model, options=options):
                    for drafted, _ in self.check(model, options, configs):
                        self.assertGreater(drafted, 0)

    def test_windows_and_rules(self):
        windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
        for non_causal in (False, True):
            head = dflash(self.folder, Shape("llama"), sliding_window_non_causal=non_causal, **windows)
            base = {"method": "dflash", "model": head, "num_speculative_tokens": 4}
            self.check("llama", SAMPLED, [base])
        self.check("llama", SAMPLED + ["--samples", "3"], [base])
        for rule in ("rejection", "block"):
            self.check("llama", GREEDY, [{**base, "rejection_sample_method": rule}])


class EarlyExit(Case):
    def test_the_exit_layer_is_measured(self):
        """Behind layer 3 nothing changes, so that its drafts are always right; earlier ones are not."""
        path = llama_whose_last_layers_do_nothing(self.path("model"), layers=8, active=3)
        config = {"method": "early_exit", "num_speculative_tokens": 4}
        lists = prompts_of(256)
        (drafted, accepted), (_, third), (_, first) = self.check(
            path, GREEDY, [config, {**config, "exit_layer": 3}, {**config, "exit_layer": 1}], lists)
        self.assertGreater(drafted, 0)
        self.assertEqual(accepted, drafted)
        self.assertEqual(accepted, third)
        self.assertLess(first, third)
        with open(self.path("ids.json"), "w", encoding="utf8") as f:
            json.dump(lists, f)
        done = self.run_program("run", path, "--ids", self.path("ids.json"), "-n", "2", "-v",
                                "--speculative-config", json.dumps(config))
        self.assertRegex(done.stderr, r"early exit behind layer 3 of 8: .* in 100 % ")


class Rules(Case):
    """Opt-in rules of acceptance."""

    def configs(self, **rule):
        s = Shape("llama")
        own = os.path.join(GOLDEN, "llama")
        return [{"method": "draft_model", "model": own, "num_speculative_tokens": 4, **rule},
                {"method": "eagle", "model": eagle(self.folder, s), "num_speculative_tokens": 3, **rule},
                {"method": "eagle3", "model": eagle3(self.folder, s), "num_speculative_tokens": 3, **rule},
                {"method": "medusa", "model": medusa(self.folder, s), "num_speculative_tokens": 3, **rule},
                {"method": "early_exit", "exit_layer": 1, "num_speculative_tokens": 4, **rule},
                {"method": "ngram", "num_speculative_tokens": 4, **rule}]

    def test_greedy_tokens_stay(self):
        for rule in ("rejection", "block", "typical"):
            self.check("llama", GREEDY, self.configs(rejection_sample_method=rule))

    def test_seeded_tokens_come_again(self):
        lists = prompts_of(Shape("llama").vocab)
        plain, _, _ = self.outputs("llama", lists, SAMPLED)
        for rule in ("rejection", "block", "typical"):
            for config in self.configs(rejection_sample_method=rule):
                with self.subTest(config=config):
                    together, drafted, accepted = self.outputs("llama", lists, SAMPLED, config)
                    if config["method"] == "ngram" and rule == "rejection":
                        self.assertEqual(together, plain, "match is rejection sampling for fixed drafts")
                    alone = []
                    for i, ids in enumerate(lists):
                        lines, _, _ = self.outputs("llama", [ids], SAMPLED, config)
                        alone += [{**line, "prompt_index": i} for line in lines]
                    self.assertEqual([line["ids"] for line in alone], [line["ids"] for line in together])
                    if config["method"] == "draft_model" and rule != "typical":
                        self.assertEqual(accepted, drafted, "a model agrees with itself")

    def test_synthetic_acceptance(self):
        config = {"method": "early_exit", "exit_layer": 1, "num_speculative_tokens": 2,
                  "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1, 0.5]}
        ids = self.path("ids.json")
        with open(ids, "w", encoding="utf8") as f:
            json.dump([[3, 4, 5]], f)
        done = self.run_program("run", os.path.join(GOLDEN, "llama"), "--ids", ids, "-n", "100", "--temp", "0",
                                "--ignore-eos", "--json", "--speculative-config", json.dumps(config))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr.count("meaningless"), 1, done.stderr)
        line = json.loads(done.stdout)
        share = line["accepted_tokens"] / line["drafted_tokens"]
        self.assertTrue(0.6 < share < 0.9, share)  # about 40 steps, 0.75 expected

PAIRS = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"


class Trees(Case):
    """Draft trees: dynamic ones, and static ones that say which ranks branch."""

    def test_trees_change_nothing(self):
        for number, model in enumerate(MODELS):
            s = Shape(model)
            heads = [{"method": "medusa", "model": medusa(self.folder, s)}]
            if s.layers >= 2:
                heads += [{"method": "eagle", "model": eagle(self.folder, s)},
                          {"method": "eagle3", "model": eagle3(self.folder, s)}]
            trees = [{"tree_nodes": 12, "tree_top_k": 3}, {"speculative_token_tree": PAIRS}]
            settings = [GREEDY, SAMPLED, PENALISED] if FULL else [(SAMPLED, GREEDY, PENALISED)[number % 3]]
            configs = [{**head, **tree, "num_speculative_tokens": 4, "tree_max_batch": 64}
                       for head in heads for tree in (trees if FULL else [trees[number % 2]])]
            for options in settings:
                with self.subTest(model=model, options=options):
                    for drafted, _ in self.check(model, options, configs):
                        self.assertGreater(drafted, 0)

    def test_a_model_agrees_with_its_own_tree(self):
        """A tree that has the greedy path accepts as much as the chain; with random draws the other ranks
        are accepted too."""
        model = "llama"
        own = {"method": "draft_model", "model": os.path.join(GOLDEN, model), "num_speculative_tokens": 3}
        tree = {**own, "tree_nodes": 9, "tree_top_k": 3, "tree_max_batch": 64}
        static = {**own, "speculative_token_tree": PAIRS, "tree_max_batch": 64}
        (_, chain), (_, dynamic), (_, ranks) = self.check(model, GREEDY, [own, tree, static])
        self.assertGreater(dynamic, 0)
        self.assertEqual(ranks, chain)
        greedy = {**own, "draft_sample_method": "greedy"}
        draws = ["--temp", "1", "--top-k", "4", "--seed", "5"]
        (_, chain), (_, dynamic) = self.check(model, draws, [greedy, {**tree, "tree_nodes": 32}])
        self.assertGreater(dynamic, 1.3 * chain)

    def test_settings(self):
        model = "llama"
        s = Shape(model)
        configs = [{"method": "draft_model", "model": os.path.join(GOLDEN, model), "num_speculative_tokens": 5,
                    "tree_nodes": 16, "tree_max_batch": 64},
                   {"method": "early_exit", "exit_layer": 1, "num_speculative_tokens": 3, "tree_nodes": 8},
                   {"method": "eagle", "model": eagle(self.folder, s), "num_speculative_tokens": 3,
                    "tree_acceptance_rates": [0.5, 0.2, 0.1], "tree_nodes": 8}]
        for options in (["--temp", "1", "--seed", "1", "--samples", "3", "--logprobs", "0"],
                        ["--temp", "0", "--kv-cache-dtype", "int8"], ["--temp", "0.8", "--seed", "2", "--kv-cache-dtype", "fp8"],
                        ["--temp", "0", "--reference"], ["--temp", "0.7", "--seed", "4", "--cpu-isa", "avx2"],
                        ["--temp", "0", "--max-model-len", "64"],
                        ["--temp", "0", "--kv-cache-memory", "256K", "--max-model-len", "128"]):
            with self.subTest(options=options):
                self.check(model, options, configs)


class Budgets(Case):
    """Steps of few tokens with more sequences than fit one step, and prompts longer than a step."""

    def answers(self, model, lists, *options):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        command = [FRESHET, "serve", os.path.join(GOLDEN, model), "--port", str(port), "-t", "2",
                   "--disable-access-log", "--log-level", "error", *options]
        with subprocess.Popen(command, stderr=subprocess.PIPE) as server:
            try:
                for _ in range(600):
                    try:
                        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                        break
                    except OSError:
                        self.assertIsNone(server.poll(), "the server is gone")
                        time.sleep(0.1)
                body = {"prompt": lists, "max_tokens": 12, "temperature": 0.8, "seed": 3,
                        "return_token_ids": True, "ignore_eos": True}
                request = urllib.request.Request(
                    f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(),
                    {"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=240) as answer:
                    choices = json.load(answer)["choices"]
                return [c["token_ids"] for c in sorted(choices, key=lambda c: c["index"])]
            finally:
                server.terminate()
                server.communicate()

    def test_narrow_steps(self):
        model = "llama"
        s = Shape(model)
        rng = random.Random(2)
        lists = [[rng.randrange(3, s.vocab) for _ in range(20 + 9 * i % 300)] for i in range(40)]
        narrow = ["--max-num-batched-tokens", "24"]
        want = self.answers(model, lists, *narrow)
        own = os.path.join(GOLDEN, model)
        for config in ({"method": "draft_model", "model": own, "num_speculative_tokens": 3},
                       {"method": "eagle", "model": eagle(self.folder, s), "num_speculative_tokens": 3},
                       {"method": "eagle3", "model": eagle3(self.folder, s), "num_speculative_tokens": 3},
                       {"method": "eagle", "model": eagle(self.folder, s), "tree_nodes": 8,
                        "tree_max_batch": 64},
                       {"method": "medusa", "model": medusa(self.folder, s), "num_speculative_tokens": 3},
                       {"method": "dflash", "model": dflash(self.folder, s)},
                       {"method": "ngram"}):
            with self.subTest(config=config):
                got = self.answers(model, lists, *narrow, "--speculative-config", json.dumps(config))
                self.assertEqual(got, want)


class WrongInput(Case):
    def refused(self, config, *parts, model="llama"):
        text = config if isinstance(config, str) else json.dumps(config)
        done = self.run_program("run", os.path.join(GOLDEN, model), "--ids", self.ids, "-n", "2",
                                "--speculative-config", text)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        for part in parts:
            self.assertIn(part, done.stderr)

    def setUp(self):
        super().setUp()
        self.ids = self.path("ids.json")
        with open(self.ids, "w", encoding="utf8") as f:
            json.dump([[3, 4, 5]], f)

    def test_configurations(self):
        self.refused("{", "not a JSON object")
        self.refused({"method": "telepathy"}, "telepathy", "ngram")
        self.refused({"method": ["ngram", "telepathy"]}, "telepathy", "suffix")
        self.refused({"method": ["ngram", "ngram"]}, "ngram is given twice")
        self.refused({"method": ["early_exit", "ngram", "draft_model"], "model": os.path.join(GOLDEN, "llama")},
                     "early_exit and draft_model")
        self.refused({"method": ["suffix", "draft_model"]}, "draft_model needs")
        self.refused({"method": []}, "list of methods")
        self.refused({"method": ["ngram", "suffix"], "tree_nodes": 8}, "drafts no trees")
        own = os.path.join(GOLDEN, "llama")
        self.refused({"method": "ngram", "parallel_drafting": True},
                     "parallel_drafting is for methods draft_model and eagle3")
        self.refused({"method": "draft_model", "model": own, "parallel_drafting": True}, "pard_token")
        plain = eagle3(self.folder, Shape("llama"))
        self.refused({"method": "eagle3", "model": plain, "parallel_drafting": True}, "mask_hidden")
        self.refused({"method": "eagle3", "model": p_eagle(self.folder, Shape("llama"))},
                     'add "parallel_drafting": true')
        blocks = dflash(self.folder, Shape("llama"))
        self.refused({"method": "dflash"}, "needs")
        self.refused({"method": "dflash", "model": blocks, "num_speculative_tokens": 6},
                     "blocks of 6 rows", "at most 5")
        self.refused({"method": "dflash", "model": blocks, "tree_nodes": 8}, "drafts no trees")
        self.refused({"method": "dflash", "model": blocks, "parallel_drafting": True}, "draft_model and eagle3")
        self.refused({"method": "dflash", "model": plain}, "hidden_norm")
        self.refused({"method": "eagle3", "model": blocks}, "for another model")
        self.refused({"method": "ngram", "speed": 9}, '"speed"', "num_speculative_tokens")
        self.refused({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens")
        self.refused({"method": "ngram", "model": os.path.join(GOLDEN, "llama")}, "takes no")
        self.refused({"method": "draft_model"}, "needs")
        self.refused({"method": "ngram", "rejection_sample_method": "greedy"}, "block", "synthetic")
        self.refused({"method": "ngram", "rejection_sample_method": "synthetic"}, "synthetic_acceptance_rates")
        self.refused({"method": "ngram", "tree_nodes": 8}, "ngram drafts no trees")
        eagle_tree = {"method": "eagle", "model": os.path.join(GOLDEN, "llama")}
        self.refused({**eagle_tree, "tree_nodes": 1000}, "tree_nodes")
        self.refused({**eagle_tree, "tree_nodes": 8, "rejection_sample_method": "block"}, "match")
        self.refused({**eagle_tree, "tree_nodes": 8, "speculative_token_tree": PAIRS}, "exclude each other")
        self.refused({**eagle_tree, "tree_acceptance_rates": [0.5]}, "tree_nodes")
        self.refused({**eagle_tree, "tree_acceptance_rates": [0.5, 0.6], "tree_nodes": 8}, "sum")
        self.refused({**eagle_tree, "speculative_token_tree": "[(0,), (0, 1, 2)]"}, "parent of (0, 1, 2)")
        self.refused({**eagle_tree, "speculative_token_tree": "[(0,), (x)]"}, "tuple 2")
        self.refused({**eagle_tree, "speculative_token_tree": "(0,)"}, "list")
        self.refused({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2}, "prompt_lookup_min")

    def test_drafters_of_other_models(self):
        s = Shape("llama")
        other = Shape("llama")
        other.hidden *= 2
        self.refused({"method": "eagle", "model": eagle(self.folder, other)}, "another model")
        self.refused({"method": "eagle3", "model": eagle3(self.folder, s, (0, 1, 99))}, "another model")
        self.refused({"method": "medusa", "model": medusa(self.folder, other)}, "blocks.0.weight")
        self.refused({"method": "eagle", "model": medusa(self.folder, s)}, "fc")
        self.refused({"method": "mtp"}, "no MTP layer")
        self.refused({"method": "early_exit", "exit_layer": 50}, "exit_layer 50")
        self.refused({"method": "draft_model", "model": self.path("nowhere")}, "nowhere")

    def test_missing_tensors(self):
        s = Shape("llama")
        folder = eagle(self.folder, s)
        tensors = {"fc.weight": [s.hidden, 2 * s.hidden], **s.layer("layers.0.", s.hidden)}
        del tensors["layers.0.self_attn.k_proj.weight"]
        save_folder(folder, s.config(), tensors, 1)
        self.refused({"method": "eagle", "model": folder}, "k_proj")
        with open(os.path.join(folder, "model.safetensors"), "r+b") as f:
            f.truncate(3000)
        self.refused({"method": "eagle", "model": folder}, "model.safetensors")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + ["-v"] + sys.argv[1:])
