"""Python: a server that a command renews after each thaw, `--after-thaw 'kill -HUP 1'`.

GET /key is a key, GET /id a random number that is no secret, and GET /upstream an answer of the service at $UPSTREAM (HOST:PORT).
"""

import http.server
import os
import random
import signal
import socket
import socketserver
import ssl

HOST, PORT = os.environ["UPSTREAM"].rsplit(":", 1)
upstream = None


def renew(*_):
    """Reseeds both generators of this process from the kernel's, and leaves the connection that the original has.

    Python runs the handler of a signal in the main thread, between two steps of the program: so before the next request is read.
    """
    global upstream
    random.seed(os.urandom(32))
    ssl.RAND_add(os.urandom(32), 32.0)  # OpenSSL's
    # Not closed: it may be in use where the signal came. It closes when that ends; the next use connects again.
    upstream = None


def ask_upstream():
    global upstream
    if upstream is None:
        upstream = socket.create_connection((HOST, PORT), timeout=30).makefile("rw")
    connection = upstream
    connection.write("ping\n")
    connection.flush()
    return connection.readline().strip()


PAGES = {
    "/key": lambda: ssl.RAND_bytes(32).hex(),
    "/id": lambda: f"{random.getrandbits(64):016x}",
    "/upstream": ask_upstream,
}


class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        page = PAGES.get(self.path)
        if page is None:
            self.send_error(404)
            return
        body = page().encode() + b"\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


signal.signal(signal.SIGHUP, renew)
socketserver.TCPServer.allow_reuse_address = True
socketserver.TCPServer(("", 8000), Server).serve_forever()
