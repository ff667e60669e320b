"""A model hub on the loopback interface, for tests: small, and able to misbehave.

FakeHub() starts two servers. The hub itself answers /api/models/REPO/revision/REV and
/REPO/resolve/REV/FILE; contents of large files come from the second one, the CDN, by a redirect to a
signed URL. `hub.faults` and `hub.cdn_faults` are lists of faults; each request for contents takes the
first. A fault is a function of (handler, body, first, headers), which answers the request, or None.

Answers have to cost little: a client whose time is up asks again while its first request is still worked
on, so on a busy machine slow answers pile up and none comes in time. Hence hashes are kept.
"""
import functools
import hashlib
import json
import ssl
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@functools.cache
def git_hash(data):
    digest = hashlib.sha1(b"blob %d\0" % len(data))
    digest.update(data)
    return digest.hexdigest()


@functools.cache
def sha256(data):
    return hashlib.sha256(data).hexdigest()


class Repo:
    def __init__(self, files, large=(".gguf", ".safetensors")):
        self.files = dict(files)
        self.large = large
        self.gated = False
        self.private_token = None  # needed for everything
        self.licence = "apache-2.0"
        self.listing = None  # replaces the answer of the API
        self.sizes = {}  # lies about sizes in the listing
        self.hashes = {}  # lies about SHA-256
        self.blobs = True  # hashes and sizes in the listing
        self.info()  # hashes the files now, not while a client waits

    def commit(self):
        tree = sorted((path, git_hash(data)) for path, data in self.files.items())
        return hashlib.sha1(repr(tree).encode()).hexdigest()

    def is_large(self, path):
        return path.endswith(tuple(self.large))

    def etag(self, path):
        data = self.files[path]
        return self.hashes.get(path, sha256(data)) if self.is_large(path) else git_hash(data)

    def info(self):
        siblings = []
        for path, data in self.files.items():
            entry = {"rfilename": path}
            if self.blobs:
                entry.update(size=self.sizes.get(path, len(data)), blobId=git_hash(data))
                if self.is_large(path):
                    entry["lfs"] = {"sha256": self.etag(path), "size": entry["size"], "pointerSize": 130}
            siblings.append(entry)
        return {"id": "x", "sha": self.commit(), "gated": "auto" if self.gated else False, "private": False,
                "siblings": siblings, "tags": ["gguf", f"license:{self.licence}"],
                "cardData": {"license": self.licence}}


    def tree(self):
        entries = []
        for path, data in self.files.items():
            entry = {"type": "file", "path": path, "size": len(data), "oid": git_hash(data)}
            if self.is_large(path):
                entry["lfs"] = {"oid": sha256(data), "size": len(data), "pointerSize": 130}
            entries.append(entry)
        return entries


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60

    def log_message(self, *_):
        pass

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except (ConnectionError, TimeoutError, ssl.SSLError, OSError):
            self.close_connection = True

    def answer(self, status, body=b"", headers=()):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        if not any(name.lower() == "content-length" for name, _ in headers):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def break_off(self):
        self.wfile.flush()
        self.close_connection = True
        self.connection.close()

    def contents(self, data, headers, faults):
        """Sends a file, from the first byte that Range asks for."""
        first = 0
        wanted = self.headers.get("Range")
        if wanted:
            first = int(wanted.split("=")[1].split("-")[0])
        if self.command == "GET":
            fault = faults.pop(0) if faults else None
            if fault is not None:
                fault(self, data, first, list(headers))
                return
        if first >= len(data) and first > 0:
            self.answer(416, b"", [("Content-Range", f"bytes */{len(data)}")])
        elif first:
            self.answer(206, data[first:], [*headers,
                        ("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")])
        else:
            self.answer(200, data, headers)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.server.owner.serve(self)


# Faults

def cut(count):
    """The connection breaks after `count` bytes of this answer."""
    def fault(h, data, first, headers):
        rest = data[first:]
        h.send_response(206 if first else 200)
        if first:
            h.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        for name, value in headers:
            h.send_header(name, value)
        h.send_header("Content-Length", str(len(rest)))
        h.end_headers()
        h.wfile.write(rest[:count])
        h.break_off()
    return fault


def short(count):
    """Says and sends `count` bytes less than there are."""
    def fault(h, data, first, headers):
        h.answer(206 if first else 200, data[first:-count],
                 [*headers] + ([("Content-Range", f"bytes {first}-{len(data) - 1 - count}/*")] if first else []))
    return fault


def status(code, *headers):
    def fault(h, _data, _first, _headers):
        h.answer(code, b"{}", headers)
    return fault


def ignores_range(h, data, _first, headers):
    h.answer(200, data, headers)


def other_range(h, data, first, headers):
    h.answer(206, data[first + 5:], [*headers, ("Content-Range", f"bytes {first + 5}-{len(data) - 1}/{len(data)}")])


def other_bytes(h, data, first, headers):
    h.answer(200, bytes(b ^ 1 for b in data), headers)


def too_long(h, data, first, headers):
    """Chunked, and longer than listed."""
    chunked(h, data + b"x" * 1000, first, headers)


def chunked(h, data, first, headers):
    h.send_response(206 if first else 200)
    if first:
        h.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
    for name, value in headers:
        h.send_header(name, value)
    h.send_header("Transfer-Encoding", "chunked")
    h.end_headers()
    rest = data[first:]
    for at in range(0, len(rest), 50000):
        piece = rest[at:at + 50000]
        h.wfile.write(b"%x\r\n" % len(piece) + piece + b"\r\n")
    h.wfile.write(b"0\r\n\r\n")


def chunked_cut(h, data, first, headers):
    h.send_response(200)
    h.send_header("Transfer-Encoding", "chunked")
    h.end_headers()
    h.wfile.write(b"%x\r\n" % 1000 + data[:700])
    h.break_off()


def huge_header(h, data, first, headers):
    h.answer(200, data[first:], [*headers, ("X-Long", "x" * 200_000)])


def stall(seconds):
    """Sends half, then nothing."""
    def fault(h, data, first, headers):
        h.send_response(206 if first else 200)
        if first:
            h.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        h.send_header("Content-Length", str(len(data) - first))
        h.end_headers()
        h.wfile.write(data[first:first + (len(data) - first) // 2])
        h.wfile.flush()
        time.sleep(seconds)
        h.break_off()
    return fault


def slow(piece, pause):
    def fault(h, data, first, headers):
        h.send_response(206 if first else 200)
        if first:
            h.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        h.send_header("Content-Length", str(len(data) - first))
        h.end_headers()
        for at in range(first, len(data), piece):
            h.wfile.write(data[at:at + piece])
            h.wfile.flush()
            time.sleep(pause)
    return fault


def garbage(h, _data, _first, _headers):
    h.wfile.write(b"\x00\x01\x02 nonsense\r\n\r\n")
    h.break_off()


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, owner, handler=Handler, tls=None):
        super().__init__(("127.0.0.1", 0), handler)
        self.owner = owner
        self.tls = tls
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def handle_error(self, request, client_address):
        pass

    @property
    def url(self):
        host = "localhost" if self.tls else "127.0.0.1"
        return f"{'https' if self.tls else 'http'}://{host}:{self.server_address[1]}"


class Cdn:
    def __init__(self, hub):
        self.hub = hub

    def serve(self, h):
        self.hub.log.append(("cdn", h.command, h.path, dict(h.headers)))
        signature = urllib.parse.parse_qs(urllib.parse.urlparse(h.path).query).get("signature", [""])[0]
        key = h.path.split("?")[0].rsplit("/", 1)[1]
        if signature != self.hub.signature or key not in self.hub.objects:
            h.answer(403, b"<Error>Request has expired</Error>")
            return
        h.contents(self.hub.objects[key], [("ETag", '"cdn-etag"')], self.hub.cdn_faults)


class FakeHub:
    def __init__(self, tls=None):
        self.repos = {}
        self.renamed = {}
        self.log = []
        self.faults = []  # for contents of small files
        self.api_faults = []
        self.cdn_faults = []
        self.objects = {}
        self.signature = "s1"
        self.sign_wrongly = 0  # the next links are expired
        self.redirect_to = None  # replaces every link to the CDN
        self.server = Server(self, tls=tls)
        self.cdn = Server(Cdn(self), tls=tls)

    @property
    def url(self):
        return self.server.url

    def close(self):
        for server in (self.server, self.cdn):
            server.shutdown()
            server.server_close()

    def requests(self, which, method="GET"):
        return [entry for entry in self.log if entry[0] == which and entry[1] == method]

    def serve(self, h):
        path = urllib.parse.unquote(h.path.split("?")[0])
        self.log.append(("hub", h.command, h.path, dict(h.headers)))
        if path.startswith("/loop"):
            h.answer(302, b"", [("Location", f"/loop{len(self.log)}")])
            return
        api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models/").strip("/").split("/")
        name = "/".join(parts[:2])
        if name in self.renamed:
            h.answer(307, b"", [("Location", h.path.replace(name, self.renamed[name]))])
            return
        repo = self.repos.get(name)
        token = (h.headers.get("Authorization") or "").removeprefix("Bearer ")
        if repo is None or (repo.private_token and token != repo.private_token and not repo.gated):
            h.answer(404 if token else 401, b"{}", [("X-Error-Code", "RepoNotFound")])
            return
        if api:
            fault = self.api_faults.pop(0) if self.api_faults else None
            if fault is not None:
                fault(h, b"", 0, [])
                return
            revision = parts[3] if len(parts) > 3 else "main"
            if revision not in ("main", repo.commit()):
                h.answer(404, b"{}", [("X-Error-Code", "RevisionNotFound")])
                return
            info = repo.info() if repo.listing is None else repo.listing
            if parts[2:3] == ["tree"]:  # only huggingface_hub asks for this
                info = repo.tree()
            body = info if isinstance(info, bytes) else json.dumps(info).encode()
            h.answer(200, body, [("Content-Type", "application/json")])
            return
        self.serve_file(h, repo, "/".join(parts[4:]), token)

    def serve_file(self, h, repo, file, token):
        if repo.gated and token != repo.private_token:
            h.answer(401 if not token else 403, b"{}", [("X-Error-Code", "GatedRepo")])
            return
        if file not in repo.files:
            h.answer(404, b"{}", [("X-Error-Code", "EntryNotFound"), ("X-Repo-Commit", repo.commit())])
            return
        data = repo.files[file]
        about = [("X-Repo-Commit", repo.commit()), ("ETag", f'"{repo.etag(file)}"')]
        if not repo.is_large(file):
            h.contents(data, about, self.faults)
            return
        key = sha256(data)
        self.objects[key] = data
        signature = self.signature
        if self.sign_wrongly > 0:
            self.sign_wrongly -= 1
            signature = "expired"
        location = self.redirect_to or f"{self.cdn.url}/objects/{key}?signature={signature}"
        h.answer(302, b"", [("X-Repo-Commit", repo.commit()), ("X-Linked-Etag", f'"{repo.etag(file)}"'),
                            ("X-Linked-Size", str(len(data))), ("Location", location)])
