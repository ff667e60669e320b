"""--config FILE: options from a TOML file.

usage: config_file_test.py     needs FRESHET (the program) and FRESHET_SOURCE_DIR
"""
import json
import re
import unittest

from cli_test import Case, run


class ConfigFile(Case):
    def ids(self, config, *flags, command=("run", "default", "Once")):
        """The token ids of a greedy run with this file."""
        path = self.write("config.toml", config)
        text = self.succeeds(*command, "--print-ids", "--config", path, *flags)
        return json.loads(text.splitlines()[0])

    def refused(self, config, *words, command=("run", "default", "Once")):
        path = self.write("config.toml", config)
        message = self.fails(2, *command, "--config", path)
        for word in words:
            self.assertIn(word, message)
        self.assertEqual(message.count("\n"), 1)

    def test_same_as_the_command_line(self):
        config = 'max-tokens = 5\ntemp = 0\nignore_eos = true\nthreads = 1\n'
        flags = ["--max-tokens", "5", "--temp", "0", "--ignore-eos", "--threads", "1"]
        text = self.succeeds("run", "default", "Once", "--print-ids", *flags)
        self.assertEqual(self.ids(config), json.loads(text.splitlines()[0]))
        self.assertEqual(len(self.ids(config)), 5)

    def test_command_line_wins(self):
        config = 'max-tokens = 5\ntemp = 0.0\nignore-eos = true\n'
        self.assertEqual(len(self.ids(config, "-n", "3")), 3)
        self.assertEqual(len(self.ids(config, "--max-tokens=4")), 4)

    def test_tables_are_for_commands(self):
        config = 'ignore-eos = true\nmax-tokens = 2\n[run]\nmax-tokens = 4\n[chat]\nmax-tokens = 9\n'
        self.assertEqual(len(self.ids(config)), 4)
        self.assertEqual(len(self.ids('[chat]\nmax-tokens = 3\n[run]\nignore-eos = true\n'
                                      'max-tokens = 6\n[bench.serve]\nport = 80\n')), 6)

    def test_model(self):
        config = f'model = "default"\nmax-tokens = 3\nignore-eos = true\n'
        self.assertEqual(len(self.ids(config, command=("run", "Once"))), 3)
        # An argument without an option of that name, and required.
        path = self.write("config.toml", f'model = "default"\nmax-tokens = 3\n')
        template = self.write("t.jinja", "{{ messages[0].content }}")
        self.succeeds("chat", "--config", path, "--chat-template", template, stdin="Once\n")

    def test_lists(self):
        one = self.ids('temp = 0\nmax-tokens = 4\nignore-eos = true\n')
        bias = ", ".join(f'"{i}=-100"' for i in set(one))
        other = self.ids(f'temp = 0\nmax-tokens = 4\nignore-eos = true\nlogit-bias = [\n  {bias}\n]\n')
        self.assertFalse(set(one) & set(other))

    def test_wrong_files(self):
        self.refused("max-token = 5\n", "config.toml:1:", "'max-token'", "did you mean 'max-tokens'?")
        self.refused("\n\nqwertyuiop = 5\n", "config.toml:3:", "unknown key 'qwertyuiop'")
        self.refused("port = 80\n", "unknown key 'port'", "freshet run")
        self.refused("[serv]\nport = 80\n", "'serv'", "did you mean 'serve'?")
        self.refused("[serve]\nprot = 80\n", "config.toml:2:", "did you mean 'port'?")
        self.refused("[bench.serve]\nporty = 80\n", "config.toml:2:", "freshet bench serve")
        self.refused("max-tokens = \n", "config.toml:1:")
        self.refused("max-tokens = 5\nmax-tokens = 6\n", "config.toml:2:")
        self.refused("temp = 0\ntemperature = 1\n", "set before")
        self.refused("threads = true\n", "'threads' takes a value")
        self.refused("ignore-eos = 1\n", "'ignore-eos' is true or false")
        self.refused("threads = [1, 2]\n", "one value")
        self.refused("threads = 99999\n", "config.toml:1:", "--threads")
        self.refused("max-tokens = \"five\"\n", "config.toml:1:", "five")
        self.refused("seed = 1979-05-27\n", "must be a string")
        self.refused('config = "other.toml"\n', "unknown key 'config'")
        self.refused("help = true\n", "unknown key 'help'")
        message = self.fails(2, "run", "default", "Once", "--config", self.path("missing.toml"))
        self.assertIn("missing.toml", message)
        self.fails(2, "run", "default", "Once", "--config", self.folder, says="cannot be read")

    def test_every_option_of_every_command(self):
        """A file may name each option in --help, for a command that does not run, too."""
        usage = run("--help").stdout
        commands = re.findall(r"^  ([a-z-]+) ", usage[usage.index("\nCommands:"):usage.index("\nOptions:")], re.M)
        self.assertGreater(len(commands), 8)
        for command in commands:
            text = run(command, "--help-all").stdout.split("-" * 100)[0]
            names = set(re.findall(r"^  (?:-\w,|   ) --([a-z][a-z0-9-]*)", text, re.M)) - {"help", "help-all", "config"}
            lines = "".join(f"{name} = 1979-05-27\n" for name in sorted(names))
            path = self.write("config.toml", f"[{command}]\n{lines}")
            other = ["tokenize", "default", "x"] if command != "tokenize" else ["inspect", "default"]
            self.assertEqual(run(*other, "--config", path).stderr, "", command)
            self.assertTrue(names or command in ("eval", "show", "rm"), command)


if __name__ == "__main__":
    unittest.main()
