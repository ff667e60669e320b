"""Tests of what is installed: completions, manual pages, packages, the service, in a clean root.

usage: packaging_test.py Class[.test]    needs FRESHET, FRESHET_SOURCE_DIR and FRESHET_BUILD_DIR
Exit code 77: a tool that the class needs is missing (tools/packages-test.txt lists them).
"""
import contextlib
import functools
import glob
import gzip
import http.client
import json
import os
import pty
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.join(os.environ.get("FRESHET_SOURCE_DIR", "."), "tests/cli"))
from cli_test import FRESHET, PATIENCE, SOURCE, Case, Terminal  # noqa: E402

BUILD = os.environ.get("FRESHET_BUILD_DIR", "build/release")
EMPTY = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def needs(*tools):
    for tool in tools:
        if shutil.which(tool) is None:
            print(f"skipped: {tool} is missing")
            sys.exit(77)


def output(*command, code=0, **options):
    """Standard output and standard error of a command that must exit with `code`."""
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, **options)
    assert result.returncode == code, f"{command}: {result.returncode}\n{result.stdout}{result.stderr}"
    return result.stdout + result.stderr


@functools.cache
def commands():
    """The commands in --help, with those below: [["run"], ..., ["bench", "serve"]]."""
    found = []

    def below(path):
        text = output(FRESHET, *path, "--help") + "\n\n"
        if "\nCommands:\n" not in text:
            return
        for name in re.findall(r"^  ([a-z-]+) ", text.split("\nCommands:\n")[1].split("\n\n")[0], re.M):
            found.append(path + [name])
            below(path + [name])
    below([])
    assert len(found) > 10, found
    return found


def options(command):
    """The names of a command's options, read from its --help-all."""
    text = output(FRESHET, *command, "--help-all").split("-" * 100)[0]  # commands below it follow
    lines = re.findall(r"^  (?:    )?((?:-[\w-]+(?:, )?)+)", text, re.M)
    names = [n for line in lines for n in line.split(", ") if n]
    assert "--help" in names
    return set(names)


class Completion(Case):
    @classmethod
    def setUpClass(cls):
        needs("bash", "zsh", "fish")

    def script(self, shell):
        return self.write(f"completion.{shell}", output(FRESHET, "completion", shell))

    def in_bash(self, *words):
        script = (f'source "{self.script("bash")}"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _freshet; '
                  'printf "%s\\n" "${COMPREPLY[@]}"')
        return set(output("bash", "--norc", "-uc", script, "bash", "freshet", *words).split())

    def test_bash(self):
        self.assertEqual(self.in_bash("ser"), {"serve"})
        self.assertLessEqual({"run", "chat", "serve", "--help"}, self.in_bash(""))
        for command in commands():
            self.assertLessEqual(options(command), self.in_bash(*command, "-"), command)
        self.assertEqual(self.in_bash("serve", "--pooling", ""),
                         {"auto", "cls", "last", "max", "mean"})
        self.assertEqual(self.in_bash("serve", "--pooling", "=", "m"), {"max", "mean"})
        self.assertEqual(self.in_bash("serve", "--port", ""), set())
        self.assertLessEqual({"serve", "ceilings"}, self.in_bash("bench", ""))
        self.assertIn("--request-rate", self.in_bash("bench", "serve", "--req"))
        self.assertEqual(self.in_bash("serve", "--request-r"), set())

    def test_bash_completes_files_and_follows_its_linter(self):
        folder = self.path("models")
        os.mkdir(folder)
        self.write("models/tiny.gguf", "")
        script = f'source "{self.script("bash")}"; complete -p freshet'
        self.assertIn("-o default", output("bash", "--norc", "-c", script))
        if shutil.which("shellcheck"):
            output("shellcheck", "--shell=bash", "--exclude=SC2034", self.script("bash"))

    def test_fish(self):
        def complete(line):
            text = output("fish", "--no-config", "-c", f"source {script}; complete -C '{line}'")
            return {row.split("\t")[0] for row in text.splitlines()}
        script = self.script("fish")
        self.assertIn("serve", complete("freshet ser"))
        for command in commands():
            found = complete(f"freshet {' '.join(command)} --")
            self.assertLessEqual({o for o in options(command) if o.startswith("--")}, found, command)
        self.assertEqual(complete("freshet serve --pooling "),
                         {"auto", "cls", "last", "max", "mean"})
        self.assertEqual(complete("freshet serve --pooling m"), {"max", "mean"})
        self.assertIn("ceilings", complete("freshet bench ceil"))
        self.assertNotIn("ceilings", complete("freshet serve ceil"))

    def test_zsh_in_a_terminal(self):
        self.script("zsh")
        os.rename(self.path("completion.zsh"), self.path("_freshet"))
        pid, master = pty.fork()
        if pid == 0:
            os.environ.update(TERM="dumb", PS1="ready> ", HOME=self.folder, ZDOTDIR=self.folder)
            os.execvp("zsh", ["zsh", "-f", "-i"])
        shell = Terminal(pid, master)
        self.addCleanup(shell.close)
        shell.wait_for("ready> ")
        shell.write(f"stty cols 300; fpath=({self.folder} $fpath); autoload -Uz compinit; compinit -u -D; "
                    "echo set-up\r")
        shell.wait_for("set-up\r\n")
        for typed, completed in (("freshet serv\t", "e "), ("freshet bench ceil\t", "ings "),
                                 ("freshet serve --pooli\t", "ng"),
                                 ("freshet serve --pooling me\t", "an "),
                                 ("freshet bench serve --request-r\t", "ate")):
            shell.wait_for("ready> ")
            shell.write(typed)
            shell.wait_for(typed[:-1] + completed)
            shell.write("\x15\r")  # an empty line instead
        shell.write("freshet run --\t")
        for name in sorted(o for o in options(["run"]) if o.startswith("--")):
            self.assertIn(name, output("cat", self.path("_freshet")))

    def test_unknown_shell(self):
        self.fails(2, "completion", "tcsh")


class ManPages(Case):
    @classmethod
    def setUpClass(cls):
        needs("man", "groff")

    def setUp(self):
        super().setUp()
        output(FRESHET, "man", "--all", self.folder)

    def test_complete_and_without_warnings(self):
        for command in [[], *commands()]:
            page = self.path("-".join(["freshet", *command]) + ".1")
            environment = {**EMPTY, "LC_ALL": "C.UTF-8", "MANWIDTH": "200"}
            result = subprocess.run(["man", "--warnings=w", "-l", page], capture_output=True, text=True,
                                    check=True, env=environment)
            self.assertEqual(result.stderr, "", page)
            for name in options(command) if command else ["--help", "--version", "FRESHET_CACHE_DIR"]:
                self.assertRegex(result.stdout, r"(?<![\w-])" + re.escape(name) + r"(?![\w-])", page)
            self.assertEqual(output("groff", "-man", "-ww", "-z", page), "")
            if shutil.which("mandoc"):
                output("mandoc", "-T", "lint", "-W", "error", page)

    def test_examples_are_as_in_help(self):
        text = output("man", "-l", self.path("freshet-run.1"), env={**EMPTY, "MANWIDTH": "200"})
        examples = output(FRESHET, "run", "--help").split("Examples:\n")[1].strip().splitlines()
        self.assertGreater(len(examples), 2)
        for line in examples:
            self.assertIn(line.strip(), text)

    def test_one_page(self):
        with open(self.path("freshet-bench-serve.1"), encoding="utf-8") as f:
            self.assertEqual(output(FRESHET, "man", "bench", "serve"), f.read())
        self.fails(2, "man", "nothing")
        self.fails(1, "man", "--all", self.path("missing"))


class Installed(Case):
    """A program and its files below self.folder."""

    def check_program(self, program, *before):
        """`before`: a command in front, e.g. chroot."""
        version = output(*before, program, "--version", env=EMPTY)
        self.assertIn("freshet", version)
        text = output(*before, program, "run", "Once", "-n", "4", "--temp", "0", env=EMPTY)
        self.assertEqual(text.splitlines()[0], output(FRESHET, "run", "Once", "-n", "4", "--temp", "0")
                         .splitlines()[0])

    def check_files(self, prefix, zsh="share/zsh/site-functions/_freshet"):
        for name in ("bin/freshet", "share/man/man1/freshet.1.gz", "share/man/man1/freshet-bench-serve.1.gz",
                     "share/bash-completion/completions/freshet", zsh,
                     "share/fish/vendor_completions.d/freshet.fish", "lib/systemd/system/freshet.service",
                     "share/doc/freshet/README.md", "share/doc/freshet/NOTICE.md"):
            self.assertTrue(os.path.isfile(os.path.join(prefix, name)), name)
        for page in glob.glob(os.path.join(prefix, "share/man/man1/*")):
            with gzip.open(page, "rt") as f:
                self.assertTrue(f.readline().startswith(".TH"), page)


class Install(Installed):
    def install(self, prefix, destdir):
        output("cmake", "--install", BUILD, "--prefix", prefix, env={**os.environ, "DESTDIR": destdir})

    def test_prefix_and_destdir(self):
        self.install("/opt/freshet", self.folder)
        root = self.path("opt/freshet")
        self.assertEqual(os.listdir(self.folder), ["opt"])
        self.check_files(root)
        self.assertTrue(os.path.isfile(os.path.join(root, "share/doc/freshet/LICENSE")))
        with open(os.path.join(root, "lib/systemd/system/freshet.service"), encoding="utf-8") as f:
            self.assertIn("ExecStart=/opt/freshet/bin/freshet serve --config "
                          "/opt/freshet/etc/freshet/serve.toml\n", f.read())
        os.rename(root, self.path("elsewhere"))
        self.check_program(self.path("elsewhere/bin/freshet"))

    def test_configuration_is_kept(self):
        self.install("/usr", self.folder)
        self.write("etc/freshet/serve.toml", "port = 9\n")
        self.install("/usr", self.folder)
        with open(self.path("etc/freshet/serve.toml"), encoding="utf-8") as f:
            self.assertEqual(f.read(), "port = 9\n")

    def test_plugin_beside_the_program(self):
        """lib/freshet is searched first, also through a link to the program."""
        fakes = glob.glob(os.path.join(BUILD, "tests/cli/fake_gpu/libfreshet_cuda.so"))
        if not fakes:
            self.skipTest("the stand-in for the plug-in is not built")
        self.install("/opt", self.folder)
        os.makedirs(self.path("opt/lib/freshet"))
        shutil.copy(fakes[0], self.path("opt/lib/freshet/"))
        os.symlink(self.path("opt/bin/freshet"), self.path("link"))
        text = output(self.path("link"), "devices", env=EMPTY)  # the stand-in runs no model
        self.assertIn("cuda:0", text)


def package(folder):
    """The tarball and the Debian package of this build, made in `folder`."""
    paths = output(os.path.join(SOURCE, "tools/package"), BUILD, folder).split()
    assert len(paths) == 2, paths
    return paths


class Package(Installed):
    @classmethod
    def setUpClass(cls):
        needs("dpkg-deb", "dpkg-shlibdeps")
        cls.made = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.made.cleanup)
        cls.archive, cls.package = package(cls.made.name)

    def test_tarball(self):
        output("tar", "-xzf", self.archive, "-C", self.folder)
        root, = glob.glob(self.path("freshet-*"))
        self.check_files(root)
        self.check_program(os.path.join(root, "bin/freshet"))
        with open(os.path.join(root, "lib/systemd/system/freshet.service"), encoding="utf-8") as f:
            self.assertIn("ExecStart=/usr/local/bin/freshet serve", f.read())

    def test_debian_package(self):
        output("dpkg-deb", "-x", self.package, self.path("root"))
        self.check_files(self.path("root/usr"), "share/zsh/vendor-completions/_freshet")
        self.check_program(self.path("root/usr/bin/freshet"))
        with open(self.path("root/usr/lib/systemd/system/freshet.service"), encoding="utf-8") as f:
            self.assertIn("ExecStart=/usr/bin/freshet serve --config /etc/freshet/serve.toml\n", f.read())
        control = output("dpkg-deb", "-f", self.package)
        self.assertRegex(control, r"Depends: .*libc6 \(>= 2\.")
        # Every library that the program names belongs to a package in Depends.
        dynamic = output("objdump", "-p", self.path("root/usr/bin/freshet"))
        for name in re.findall(r"NEEDED +(\S+)", dynamic):
            if name.startswith("ld-linux"):
                continue
            owner = output("dpkg", "-S", f"*/{self.architecture()}/{name}").split(":")[0]
            self.assertIn(owner, control, name)

    @staticmethod
    def architecture():
        return output("dpkg-architecture", "-qDEB_HOST_MULTIARCH").strip()

    def test_same_bytes_again(self):
        for first, again in zip((self.archive, self.package), package(self.folder)):
            with open(first, "rb") as a, open(again, "rb") as b:
                self.assertTrue(a.read() == b.read(), first)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def healthy(port):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False


class Server:
    """A process that runs a server on `port`."""

    def __init__(self, command, port):
        self.port = port
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL,
                                        env={**EMPTY, "FRESHET_CACHE_DIR": "/nonexistent"})
        end = time.time() + PATIENCE
        while not healthy(port):
            assert self.process.poll() is None and time.time() < end, "the server does not start"
            time.sleep(0.05)

    def stop(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Service(Case):
    @classmethod
    def setUpClass(cls):
        needs("systemd-analyze")

    def setUp(self):
        super().setUp()
        output("cmake", "--install", BUILD, "--prefix", self.path("opt"), env={**os.environ, "DESTDIR": ""})
        self.unit = self.path("opt/lib/systemd/system/freshet.service")
        with open(self.unit, encoding="utf-8") as f:
            self.command = re.search(r"^ExecStart=(.*)$", f.read(), re.M).group(1).split()

    def test_verify(self):
        environment = {**EMPTY, "MANPATH": self.path("opt/share/man")}
        self.assertEqual(output("systemd-analyze", "verify", self.unit, env=environment), "")

    def test_security(self):
        text = output("systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=25", self.unit)
        exposure = float(re.search(r"Overall exposure level.*: ([\d.]+)", text).group(1))
        self.assertLess(exposure, 2.5, text)

    def test_sigterm_lets_requests_finish_and_it_starts_again(self):
        port = free_port()
        config = os.path.join(self.path("opt/etc/freshet"), "serve.toml")
        self.assertEqual(self.command[-2:], ["--config", config])
        with open(config, encoding="utf-8") as f:
            text = f.read()
        self.assertIn("port = 8000", text)
        with open(config, "w", encoding="utf-8") as f:
            f.write(text.replace("port = 8000", f"port = {port}"))
        for _ in range(2):
            server = Server(self.command, port)
            self.addCleanup(server.stop)
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
            self.addCleanup(connection.close)
            body = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True, "stream": True}
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            self.assertEqual(answer.status, 200)
            begun = answer.readline()
            server.process.send_signal(signal.SIGTERM)
            rest = answer.read().decode()
            self.assertTrue(begun)
            self.assertIn('"finish_reason":"length"', rest.replace(" ", ""))
            self.assertIn("data: [DONE]", rest)
            self.assertEqual(server.process.wait(PATIENCE), 0)

    def test_example_configuration_names_real_options(self):
        """Also the lines that are commented out."""
        with open(os.path.join(SOURCE, "packaging/serve.toml"), encoding="utf-8") as f:
            text = re.sub(r"^# (?=[a-z-]+ = )", "", f.read(), flags=re.M)
        seen = {}
        for line in text.splitlines():  # the last of two settings
            if "=" in line and not line.startswith("#"):
                seen[line.split(" = ")[0]] = line
        self.assertGreater(len(seen), 6)
        path = self.write("all.toml", "[serve]\n" + "\n".join(seen.values()) + "\n")
        self.succeeds("inspect", "default", "--config", path)


class Docker(Case):
    FOLDER = os.path.join(SOURCE, "packaging/docker")

    def test_health_check(self):
        port = free_port()
        check = os.path.join(self.FOLDER, "healthy")
        self.assertNotEqual(subprocess.run([check, str(port)], capture_output=True, check=False).returncode, 0)
        server = Server([FRESHET, "serve", "--port", str(port)], port)
        self.addCleanup(server.stop)
        output(check, str(port), env=EMPTY)

    def test_lint(self):
        if shutil.which("hadolint") is None:
            self.skipTest("hadolint is missing")
        for name in ("Dockerfile.cpu", "Dockerfile.cuda"):
            output("hadolint", "-c", os.path.join(self.FOLDER, "hadolint.yaml"), os.path.join(self.FOLDER, name))

    def test_copied_files_exist(self):
        for name in ("Dockerfile.cpu", "Dockerfile.cuda"):
            with open(os.path.join(self.FOLDER, name), encoding="utf-8") as f:
                lines = re.findall(r"^COPY (?!--from)(?:--\S+ )*(.*)$", f.read(), re.M)
            self.assertGreater(len(lines), 2)
            for line in lines:
                for source in line.split()[:-1]:
                    self.assertTrue(os.path.exists(os.path.join(SOURCE, source)), source)


class CleanRoot(Installed):
    """The Debian package in a root that holds the essential packages alone."""

    @classmethod
    def setUpClass(cls):
        needs("mmdebstrap", "dpkg-shlibdeps")
        if os.geteuid() != 0:
            print("skipped: chroot needs root")
            sys.exit(77)

    def test_install_chat_complete_read_remove(self):
        with open("/etc/os-release", encoding="utf-8") as f:
            release = re.search(r"VERSION_CODENAME=(\w+)", f.read())
        root = self.path("root")
        made = subprocess.run(["mmdebstrap", "--variant=minbase", "--include=man-db,bash-completion",
                               "--dpkgopt=force-unsafe-io",
                               release.group(1), root], capture_output=True, text=True, check=False)
        if made.returncode != 0:
            self.skipTest("no clean root: " + made.stderr.strip().splitlines()[-1])
        shutil.copy(package(self.path("out"))[1], os.path.join(root, "freshet.deb"))
        inside = ["unshare", "--mount", "--pid", "--fork", f"--mount-proc={root}/proc", "chroot", root]
        output(*inside, "sh", "-c", "apt-get update -qq && apt-get install -y -qq --no-install-recommends "
               "/freshet.deb", env={**EMPTY, "DEBIAN_FRONTEND": "noninteractive", "HOME": "/root"})
        self.check_program("/usr/bin/freshet", *inside)

        with open(os.path.join(root, "plain.jinja"), "w", encoding="utf-8") as f:
            f.write(TEMPLATE)
        cpu_seconds = lambda: sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        start = cpu_seconds()
        text = output(*inside, "freshet", "chat", "default", "--chat-template", "/plain.jinja", "-n", "32",
                      env={**EMPTY, "HOME": "/root"}, input="Once upon a time\n")
        self.assertLess(cpu_seconds() - start, 3.0 * os.cpu_count())
        self.assertGreater(len(text.split()), 8, text)

        text = output(*inside, "man", "freshet-serve", env={**EMPTY, "MANWIDTH": "100"})
        self.assertIn("--max-model-len", text)
        script = ("source /usr/share/bash-completion/bash_completion; _completion_loader freshet; "
                  "COMP_WORDS=(freshet serve --max-mod); COMP_CWORD=2; _freshet; echo ${COMPREPLY[@]}")
        self.assertEqual(output(*inside, "bash", "-c", script, env=EMPTY).strip(), "--max-model-len")

        self.assertTrue(os.path.exists(os.path.join(root, "etc/freshet/serve.toml")))
        output(*inside, "dpkg", "--purge", "freshet", env=EMPTY)
        left = output(*inside, "find", "/usr", "/etc", "-name", "*freshet*", "-not", "-path", "*/var/*")
        self.assertEqual(left, "")


if __name__ == "__main__":
    unittest.main()
