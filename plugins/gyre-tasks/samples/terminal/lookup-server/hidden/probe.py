import socket
import subprocess
import sys

process = subprocess.Popen([sys.executable, "server.py", "0"], stdout=subprocess.PIPE, text=True)
line = process.stdout.readline()
PORT = int(line.split()[2]) if line.startswith("listening on ") else sys.exit(f"the server said {line!r}")


class Client:
    def __init__(self):
        self.socket = socket.create_connection(("127.0.0.1", PORT), timeout=3)
        self.file = self.socket.makefile("rw", encoding="utf-8", newline="\n")

    def ask(self, text):
        self.file.write(text + "\n")
        self.file.flush()
        return self.file.readline().rstrip("\n")


def get():
    client = Client()
    assert client.ask("GET Anchor") == "OK holds a ship"
    assert client.ask("GET anchor") == "OK holds a ship"
    assert client.ask("GET ÉTÉ") == "OK summer, in French"
    assert client.ask("GET buoy") == "OK floats and marks"


def absent():
    client = Client()
    assert client.ask("GET starfish") == "NONE"
    assert client.ask("GET notes") == "NONE"
    assert client.ask("GET anchor") == "OK holds a ship"
    assert client.ask("FETCH anchor") == "ERR"
    assert client.ask("GET") == "ERR"


def count():
    client = Client()
    assert client.ask("COUNT b") == "OK 3"
    assert client.ask("COUNT BO") == "OK 1"
    assert client.ask("COUNT zz") == "OK 0"


def many():
    first, second = Client(), Client()
    assert second.ask("GET anchor") == "OK holds a ship"
    assert first.ask("GET anchor") == "OK holds a ship"


try:
    {"get": get, "absent": absent, "count": count, "many": many}[sys.argv[1]]()
finally:
    process.kill()
