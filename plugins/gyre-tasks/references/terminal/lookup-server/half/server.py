"""A dictionary over TCP, one request a line: GET WORD, COUNT PREFIX, QUIT. Reads words.txt (WORD<tab>MEANING)."""

import bisect
import socketserver
import sys


def load(path):
    table = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            word, tab, meaning = line.rstrip("\n").partition("\t")
            if tab:
                table.setdefault(word.lower(), meaning)
    return table


TABLE = load("words.txt")
KEYS = sorted(TABLE)


def reply(line):
    command, _, argument = line.strip().partition(" ")
    argument = argument.strip().lower()
    if command == "GET" and argument:
        return f"OK {TABLE[argument]}" if argument in TABLE else "NONE"
    if command == "COUNT" and argument:
        first = bisect.bisect_left(KEYS, argument)
        last = bisect.bisect_right(KEYS, argument)
        return f"OK {last - first}"
    return "ERR"


class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        for raw in self.rfile:
            line = raw.decode("utf-8", "replace")
            if line.strip() == "QUIT":
                return
            self.wfile.write((reply(line) + "\n").encode())


class Server(socketserver.TCPServer):
    daemon_threads = True
    allow_reuse_address = True


if __name__ == "__main__":
    with Server(("127.0.0.1", int(sys.argv[1])), Handler) as server:
        print("listening on", server.server_address[1], flush=True)
        server.serve_forever()
