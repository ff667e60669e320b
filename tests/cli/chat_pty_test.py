"""Tests of `freshet chat` and `freshet run` on a terminal: a pseudo-terminal whose screen pyte emulates.

usage: chat_pty_test.py [Class[.test] ...]    needs FRESHET (the program)
Exit code 77: pyte is not installed.
"""
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import tempfile
import termios
import time
import unicodedata
import unittest

try:
    import pyte
except ImportError:
    print("pyte is not installed (Debian: python3-pyte)")
    sys.exit(77)

FRESHET = os.environ.get("FRESHET", "build/release/bin/freshet")
# For what must happen soon. The machine may be slow and busy, so only what never happens takes as long.
PATIENCE = 180
# Flags for answers that last until they are interrupted, on fast machines, too.
SLOWLY = ("--reference", "-t", "1")
ROWS, COLUMNS = 24, 60
TEMPLATE = ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:")
SENTENCES = {
    "German": 'Was heißt "Fluß"? Äpfel, Öl, Übung',
    "Chinese": "你好吗？今天天气怎么样",
    "Arabic": "مرحبا كيف حالك",
    "emoji": "🙂 👩‍👩‍👧 🇩🇪 ok",
    "combining": "e\u0301te\u0301 nai\u0308f",
}


class Terminal:
    """The user's side of a pseudo-terminal. All waits are for something that is shown, with a time limit."""
    PROMPT = b"\r\x1b[J> \r\x1b[2C"
    NO_ANSWER = re.compile(rb"prompt +\d+ %|\x1b\[[0-9;?]*[A-Za-z]|\s")

    def __init__(self, arguments, environment, rows=ROWS, columns=COLUMNS):
        self.screen = pyte.HistoryScreen(columns, rows, history=2000)
        self.stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.closed = False
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            os.execve(FRESHET, [FRESHET, *arguments], environment)
        self.mark = 0
        self.typed_at = 0  # in `raw`

    def read(self, seconds):
        if not select.select([self.master], [], [], max(0.0, seconds))[0]:
            return False
        try:
            data = os.read(self.master, 65536)
        except OSError:  # EIO: the other side is closed, and all that it wrote is read
            self.closed = True
            return False
        self.raw += data
        self.stream.feed(data)
        return True

    def write(self, text):
        self.typed_at = len(self.raw)
        os.write(self.master, text.encode())

    def lines(self):
        """The screen, without blanks at the end."""
        lines = [line.rstrip() for line in self.screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def row(self):
        """The row of the cursor. pyte leaves an empty cell behind a wide character, so blanks do not count."""
        return self.screen.display[self.screen.cursor.y].replace(" ", "")

    def wait_until(self, shown, what):
        """Reads until `shown()` holds."""
        end = time.time() + PATIENCE
        while not shown():
            if time.time() > end or self.closed:
                raise AssertionError(f"no {what} within {PATIENCE} s: {self.lines()} {self.raw[self.mark:]!r}")
            self.read(end - time.time())

    def wait_for(self, text):
        """Waits until the raw output since the last wait has the text."""
        wanted = text.encode()
        self.wait_until(lambda: wanted in self.raw[self.mark:], repr(text))
        self.mark = self.raw.index(wanted, self.mark) + len(wanted)

    def wait_for_row(self, text):
        """Waits until the cursor is in a row with this text, without blanks."""
        self.wait_until(lambda: self.row() == text, repr(text))

    def wait_for_end(self, *rows):
        """Waits until these are the last rows of the screen, without blanks."""
        self.wait_until(lambda: [l.replace(" ", "") for l in self.lines()[-len(rows):]] == list(rows), repr(rows))

    def wait_for_answer(self):
        """Waits until a piece of an answer is shown, which the progress of the prompt is not."""
        self.wait_until(lambda: len(self.NO_ANSWER.sub(b"", self.raw[self.mark:])) >= 20, "answer")
        self.mark = len(self.raw)

    def wait_for_prompt(self):
        """Waits until an empty prompt is drawn, in a row below the one where something was typed."""
        self.wait_until(lambda: b"\n" in self.raw[self.typed_at:] and self.raw.endswith(self.PROMPT), "prompt")
        self.mark = len(self.raw)

    def exit_code(self):
        """Reads all that the program writes until it has exited."""
        self.wait_until(lambda: self.closed, "exit")
        self.pid, pid = 0, self.pid
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def echoes(self):
        return bool(termios.tcgetattr(self.master)[3] & termios.ECHO)

    def close(self):
        if self.pid != 0:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.master)


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.template = self.write_file("t.jinja", TEMPLATE)

    def write_file(self, name, text):
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)
        return path

    def environment(self, **changes):
        values = {k: v for k, v in os.environ.items()
                  if k not in ("LANG", "LC_ALL", "LC_CTYPE", "NO_COLOR")}
        return {**values, "FRESHET_CACHE_DIR": self.folder, "TERM": "xterm", **changes}

    def start(self, *arguments, rows=ROWS, columns=COLUMNS, **changes):
        terminal = Terminal(arguments, self.environment(**changes), rows, columns)
        self.addCleanup(terminal.close)
        return terminal

    def chat(self, *arguments, template=None, **options):
        terminal = self.start("chat", "default", "--chat-template", template or self.template,
                              "--temp", "0", *arguments, **options)
        terminal.wait_for("/help")
        terminal.wait_for_prompt()
        return terminal

    def saved(self, terminal):
        """The conversation, as /save writes it."""
        path = os.path.join(self.folder, "saved.json")
        if os.path.exists(path):
            os.remove(path)
        terminal.write(f"/save {path}\r")
        terminal.wait_for("(saved ")
        terminal.wait_for_prompt()
        with open(path, encoding="utf-8") as f:
            return json.load(f)

    def users(self, terminal):
        return [m["content"] for m in self.saved(terminal) if m["role"] == "user"]


class Typing(Case):
    def test_every_language_in_every_locale(self):
        for locale in ({}, {"LANG": "C"}, {"LANG": "C.UTF-8"}, {"LC_ALL": "de_DE.ISO-8859-1"}):
            with self.subTest(locale=locale):
                t = self.chat("-n", "2", **locale)
                for language, text in SENTENCES.items():
                    for character in text:  # key by key, as it is typed
                        t.write(character)
                    if language != "emoji":  # pyte knows no joined ones
                        t.wait_for_row(unicodedata.normalize("NFC", ">" + text.replace(" ", "")))
                    t.write("\r")
                    t.wait_for_prompt()
                self.assertEqual(self.users(t), list(SENTENCES.values()))
                t.write("\x04")
                self.assertEqual(t.exit_code(), 0)

    def test_editing(self):
        t = self.chat("-n", "2")
        t.write("你好x\x7f吗\x1b[D\x1b[D!\x1b[H<\x1b[F>")
        t.wait_for_row("><你!好吗>")
        t.write("\r")
        t.wait_for_prompt()
        t.write("\x1b[A\x01again: \r")  # the message before, with more in front
        t.wait_for_prompt()
        self.assertEqual(self.users(t), ["<你!好吗>", "again: <你!好吗>"])

    def test_history_survives(self):
        t = self.chat("-n", "2")
        t.write("Fluß 你好\r")
        t.wait_for_prompt()
        t.write("\x04")
        self.assertEqual(t.exit_code(), 0)
        self.assertEqual(os.stat(os.path.join(self.folder, "chat_history.jsonl")).st_mode & 0o077, 0)
        t = self.chat("-n", "2")
        t.write("\x12\x1b[B\x1b[A\r")  # Ctrl-R, and the arrows
        t.wait_for_prompt()
        self.assertEqual(self.users(t), ["Fluß 你好"])

    def test_long_lines_wrap_where_they_should(self):
        t = self.chat("-n", "2", columns=20)
        t.write("aaaaaaaaaaaaaaaaa你好 end")
        t.wait_for_end(">aaaaaaaaaaaaaaaaa", "你好end")
        t.write("\x01\x1b[3~")  # erases the first letter
        t.wait_for_end(">aaaaaaaaaaaaaaaa你", "好end")

    def test_several_lines(self):
        t = self.chat("-n", "2")
        t.write("one\x1b\rtwo\r")  # Alt-Enter
        t.wait_for_prompt()
        t.write("three\\\rfour\r")
        t.wait_for_prompt()
        t.write('"""\rfive\r/exit\r"""\r')
        t.wait_for_prompt()
        self.assertEqual(self.users(t), ["one\ntwo", "three\nfour", "five\n/exit"])

    def test_a_dumb_terminal_edits_lines_itself(self):
        t = self.start("chat", "default", "--chat-template", self.template, "-n", "2", TERM="dumb")
        t.wait_for("> ")
        t.write("Fluß 你好\r")
        t.wait_for("\n")
        t.wait_for("> ")
        t.write("/history\r")
        t.wait_for("user: Fluß 你好")
        self.assertNotIn(b"\x1b", t.raw)


class Pasting(Case):
    TEN = "\n".join(f"line {i}" for i in range(10))

    def paste(self, t, text):
        t.write("\x1b[200~" + text.replace("\n", "\r") + "\x1b[201~")

    def test_ten_lines_are_one_message(self):
        for locale in ({}, {"LANG": "C"}, {"LANG": "C.UTF-8"}):
            with self.subTest(locale=locale):
                t = self.chat("-n", "2", **locale)
                self.paste(t, self.TEN)
                t.wait_until(lambda: t.lines()[-10:] == ["> line 0"] + [f"  line {i}" for i in range(1, 10)],
                             "pasted lines")
                t.write("\r")
                t.wait_for_prompt()
                self.assertEqual(self.users(t), [self.TEN])

    def test_a_paste_is_no_command(self):
        t = self.chat("-n", "2")
        self.paste(t, "/exit is a word here\n/exit\n")
        t.write("\r")
        t.wait_for_prompt()
        self.paste(t, "/exit")
        t.write("\r")
        t.wait_for_prompt()
        t.write("\x1b[A\r")  # not when it is recalled, either
        t.wait_for_prompt()
        self.assertEqual(self.users(t), ["/exit is a word here\n/exit", "/exit", "/exit"])

    def test_commands_stand_alone(self):
        t = self.chat("-n", "2")
        t.write("/exit is a word here\r")
        t.wait_for("/exit takes no text")
        t.wait_for_prompt()
        t.write(" /exit as text\r")
        t.wait_for_prompt()
        self.assertEqual(self.users(t), ["/exit as text"])
        t.write("/exit\r")
        self.assertEqual(t.exit_code(), 0)
        self.assertTrue(t.raw.rstrip().endswith(b"\x1b[?2004l"))

    def test_controls_in_a_paste_do_nothing(self):
        t = self.chat("-n", "2")
        self.paste(t, "a\x1b[2Jb\x03c\x04d")
        t.write("\r")
        t.wait_for_prompt()
        self.assertEqual(self.users(t), ["a[2Jbcd"])

    def test_more_lines_than_the_screen_has(self):
        t = self.chat("-n", "2", rows=8)
        many = "\n".join(f"row {i}" for i in range(40))
        self.paste(t, many)
        t.wait_until(lambda: "  row 39" in t.lines(), "last row")
        t.write("\r")
        t.wait_for_prompt()
        self.assertEqual(self.users(t), [many])


class Interrupting(Case):
    LOCALES = ({}, {"LANG": "C"}, {"LANG": "C.UTF-8"})

    def test_at_an_empty_prompt(self):
        for locale in self.LOCALES:
            with self.subTest(locale=locale):
                t = self.chat("-n", "2", **locale)
                t.write("\x03")
                t.wait_for("Ctrl-C again or Ctrl-D leaves")
                t.wait_for_prompt()
                t.write("x\x7f\x03")  # another key in between: the hint again
                t.wait_for("Ctrl-C again or Ctrl-D leaves")
                t.wait_for_prompt()
                self.assertFalse(t.echoes())
                t.write("\x03")
                self.assertEqual(t.exit_code(), 0)
                self.assertTrue(t.echoes())

    def test_while_typing(self):
        for locale in self.LOCALES:
            with self.subTest(locale=locale):
                t = self.chat("-n", "2", **locale)
                t.write("never sent 你好")
                t.wait_for_row(">neversent你好")
                t.write("\x03")
                t.wait_for_prompt()
                t.write("sent\r")
                t.wait_for_prompt()
                self.assertEqual(self.users(t), ["sent"])

    def test_before_the_first_token(self):
        # The plain reference needs seconds for this prompt.
        for locale in self.LOCALES:
            with self.subTest(locale=locale):
                t = self.chat("-n", "2", "--reference", "-t", "1", **locale)
                t.write("\x1b[200~" + "word " * 1900 + "\x1b[201~\r")
                t.wait_for("prompt ")  # its progress is shown
                t.write("\x03")
                t.wait_for("taken back")
                t.wait_for_prompt()
                self.assertEqual(self.saved(t), [])

    def test_in_an_answer(self):
        for locale in self.LOCALES:
            with self.subTest(locale=locale):
                t = self.chat("-n", "1500", "--ignore-eos", *SLOWLY, **locale)
                t.write("Tell me a story\r")
                t.wait_for("Tell me a story")
                t.wait_for("\n")
                t.wait_for_answer()
                t.write("\x03")
                t.wait_for("(stopped)")
                t.wait_for_prompt()
                messages = self.saved(t)
                self.assertEqual([m["role"] for m in messages], ["user", "assistant"])
                self.assertTrue(messages[1]["content"])

    def test_the_terminal_is_put_back(self):
        t = self.chat("-n", "1500", "--ignore-eos", *SLOWLY)
        t.write("Tell me a story\r")
        t.wait_for("Tell me a story")
        t.wait_for("\n")
        t.wait_for_answer()
        os.kill(t.pid, signal.SIGTERM)
        self.assertEqual(t.exit_code(), 130)
        self.assertTrue(t.echoes())
        t = self.chat("-n", "2")
        os.kill(t.pid, signal.SIGTERM)
        self.assertEqual(t.exit_code(), 130)
        self.assertTrue(t.echoes())


class Showing(Case):
    # A template that makes the greedy answer irrelevant: what is checked is around it.

    def test_statistics_are_on_a_line_of_their_own(self):
        t = self.chat("-n", "5", "--stats")
        t.write("Hello\r")
        t.wait_for("tokens of prompt in")
        t.wait_for_prompt()
        line = next(l for l in t.lines() if "tokens of prompt in" in l)
        self.assertRegex(line, r"^\d+ tokens of prompt")
        self.assertRegex(t.raw.decode(errors="replace"), "\n\x1b\\[2m\\d+ tokens of prompt")

    def test_no_color(self):
        t = self.chat("-n", "5", "--stats", NO_COLOR="1")
        t.write("Hello\r")
        t.wait_for("tokens of prompt in")
        t.wait_for_prompt()
        self.assertEqual(re.findall(rb"\x1b\[[0-9;]*m", t.raw), [])

    def test_answers_wrap_at_words(self):
        story = self.write_file("s.jinja", "{{ messages[0].content }}")
        t = self.chat("-n", "150", "--ignore-eos", template=story, columns=30, rows=100)
        t.write("Once upon a time\r")
        t.wait_for("stopped after 150 tokens")
        t.wait_for_prompt()
        answer = self.saved(t)[1]["content"]
        words = set(answer.split())
        lines = t.lines()
        begin = lines.index("> Once upon a time") + 1
        end = next(i for i, l in enumerate(lines) if l.startswith("(stopped after"))
        self.assertGreater(end - begin, 5)
        for line in lines[begin:end]:  # no word is cut
            self.assertLessEqual(set(re.sub(r"[*_`#>•│]", "", line).split()),
                                 {re.sub(r"[*_`#>•│]", "", w) for w in words} | words)

    def test_a_full_context_is_said(self):
        t = self.chat("--max-model-len", "64", "-n", "-1", "--ignore-eos")
        t.write("Tell me a story\r")
        t.wait_for("the context is full (64 tokens)")
        t.wait_for_prompt()
        t.write("And another one\r")
        t.wait_for("the model holds 64")
        t.wait_for_prompt()
        self.assertEqual(self.users(t), ["Tell me a story"])
        t.write("/trim\r")
        t.wait_for("1 turn dropped")
        t.wait_for_prompt()
        t.write("\x1b[A\x1b[A\x1b[A\r")  # before /trim and /save: the message that was refused
        t.wait_for_prompt()
        self.assertEqual(self.users(t), ["And another one"])

    def test_commands_answer(self):
        t = self.chat("-n", "2")
        for command, says in (("/temp 0.5", "temperature 0.5"), ("/temp", "temperature 0.5"),
                              ("/temp -1", "at least 0"), ("/system", "no system message"),
                              ("/system Be brief.", "system message set"),
                              ("/system", "Be brief."), ("/stats", "speed is shown"),
                              ("/reset", "forgotten"), ("/undo", "nothing to take back"),
                              ("/retry", "no message"), ("/nonsense", "no command /nonsense"),
                              ("/load missing.json", "missing.json")):
            t.write(command + "\r")
            t.wait_for(command)
            t.wait_for(says)
            t.wait_for_prompt()
        t.write("/help\r")
        t.wait_for("/exit")
        t.wait_for_prompt()
        named = re.findall(r"^(/\w+)", "\n".join(t.lines()), re.M)
        self.assertIn("/load", named)
        for command in named:  # all that /help lists exist
            if command != "/exit":
                t.write(command + "\r")
                t.wait_for(command)
                t.wait_for_prompt()
        self.assertNotIn(b"no command /load", t.raw)
        self.assertEqual(t.raw.count(b"no command"), 1)

    def test_save_and_load(self):
        t = self.chat("-n", "4", "--system", "Be kind.")
        t.write("你好\r")
        t.wait_for_prompt()
        messages = self.saved(t)
        t.write("/reset\r")
        t.wait_for_prompt()
        t.write(f"/load {os.path.join(self.folder, 'saved.json')}\r")
        t.wait_for("loaded 3 messages")
        t.wait_for_prompt()
        self.assertEqual(self.saved(t), messages)

    def test_run_echoes_what_it_continues(self):
        t = self.start("run", "Once upon a time", "-n", "4")
        t.wait_for("Once upon a time")
        self.assertEqual(t.exit_code(), 0)
        self.assertTrue(any(l.startswith("Once upon a time") and len(l.split()) > 5
                            for l in t.lines()), t.lines())

    def test_slow_answers_lose_no_text(self):
        """The progress of the prompt does not come back between tokens, however long they take."""
        t = self.start("run", "default", "Once upon a time", "-n", "1500", "--ignore-eos", "-t", "1")
        t.wait_for("Once upon a time")
        begun = len(t.raw) + 100  # more than styles and the spaces that wrap lines
        t.wait_until(lambda: len(t.raw) >= begun, "answer")
        for _ in range(4):
            os.kill(t.pid, signal.SIGSTOP)
            time.sleep(0.7)
            os.kill(t.pid, signal.SIGCONT)
            t.read(0.05)
        self.assertEqual(t.exit_code(), 0)
        self.assertNotRegex(t.raw[begun:], rb"prompt +\d+ %")

    def test_run_shows_the_progress_of_a_prompt(self):
        t = self.start("run", "default", "word " * 1900, "-n", "1", "-t", "1", "--reference")
        t.wait_for("prompt ")
        t.wait_for("%")
        self.assertEqual(t.exit_code(), 0)


if __name__ == "__main__":
    unittest.main()
