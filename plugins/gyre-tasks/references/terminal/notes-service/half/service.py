"""Notes over HTTP. PUT /notes/NAME stores the body, GET /notes/NAME gives it back, DELETE removes it."""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

CONFIG = json.loads(Path("config.json").read_text())
STORE = Path(CONFIG["data_dir"]) / "notes.json"
NOTES = {}


def load():
    STORE.parent.mkdir(parents=True, exist_ok=True)
    if STORE.exists():
        NOTES.update(json.loads(STORE.read_text()))


def save():
    partial = STORE.with_suffix(".partial")
    partial.write_text(json.dumps(NOTES))
    partial.replace(STORE)


class Handler(BaseHTTPRequestHandler):
    def answer(self, code, body=b""):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def name(self):
        return self.path.removeprefix("/notes/") if self.path.startswith("/notes/") else None

    def do_GET(self):
        if self.path == "/health":
            self.answer(200, b"ok")
        elif self.name() in NOTES:
            self.answer(200, NOTES[self.name()].encode())
        else:
            self.answer(404)

    def do_PUT(self):
        length = int(self.headers["Content-Length"])
        NOTES[self.name()] = self.rfile.read(length).decode()
        self.answer(201)

    def do_DELETE(self):
        found = NOTES.pop(self.name(), None) is not None
        save()
        self.answer(204)

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    load()
    server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    print("listening on", server.server_port, flush=True)
    server.serve_forever()
