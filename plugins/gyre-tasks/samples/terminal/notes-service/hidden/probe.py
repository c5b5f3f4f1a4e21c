import subprocess
import sys
import urllib.error
import urllib.request


class Service:
    def __enter__(self):
        self.process = subprocess.Popen([sys.executable, "service.py", "0"], stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        if not line.startswith("listening on "):
            sys.exit(f"the service said {line!r}")
        self.base = f"http://127.0.0.1:{int(line.split()[2])}"
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def call(self, method, path, body=None):
        request = urllib.request.Request(self.base + path, body, method=method)
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()


def health():
    with Service() as service:
        assert service.call("GET", "/health") == (200, b"ok")


def roundtrip():
    with Service() as service:
        service.call("PUT", "/notes/probe-a", "grüße, zeile 1\nzeile 2!".encode())
        assert service.call("GET", "/notes/probe-a") == (200, "grüße, zeile 1\nzeile 2!".encode())
        assert service.call("GET", "/notes/never-there")[0] == 404


def delete():
    with Service() as service:
        service.call("PUT", "/notes/probe-b", b"x!")
        assert service.call("DELETE", "/notes/probe-b")[0] == 204
        assert service.call("DELETE", "/notes/probe-b")[0] == 404
        assert service.call("GET", "/notes/probe-b")[0] == 404


def restart():
    with Service() as service:
        service.call("PUT", "/notes/probe-c", b"kept?")
    with Service() as service:
        assert service.call("GET", "/notes/probe-c") == (200, b"kept?")


{"health": health, "roundtrip": roundtrip, "delete": delete, "restart": restart}[sys.argv[1]]()
