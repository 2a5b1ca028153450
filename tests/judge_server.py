"""A small OpenAI-compatible server that scores texts: `python tests/judge_server.py PORT LOG [noisy]`.

It scores the response that it is sent by its length, or, noisily, with another number each time. Every score that it
gives is a line of LOG: the digest of what it was sent, and the score. A response may ask it to misbehave, as in
`<status=503>`.
"""

import hashlib
import json
import random
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        asked = json.loads(body)
        system, user = (message["content"] for message in asked["messages"])
        text = user.rpartition("Response:\n")[2]
        self.server.heard.append((self.path, self.headers.get("Authorization"), asked["model"], system, user))
        wish, _, value = re.search(r"<(\w*)=?([^>]*)>", text + "<>")[0].strip("<>").partition("=")
        if wish == "wait":
            time.sleep(float(value))
        if wish == "status":
            return self.reply(int(value), self.headers.get("Authorization", "").encode())
        if wish == "busy" and text not in self.server.busy:
            self.server.busy.add(text)
            return self.reply(429, b"{}", {"Retry-After": "0"})
        if wish == "torn" and text not in self.server.busy:
            self.server.busy.add(text)
            self.close_connection = True
            return self.reply(200, b'{"choices": [{"mess', {"Content-Length": "1000"})
        if wish == "moved":
            return self.reply(307, b"", {"Location": "http://127.0.0.1:9/v1/chat/completions"})
        if wish == "huge":
            return self.reply(200, b" " * (2 << 20))
        if wish == "trickle":
            return self.trickle()
        score = random.randint(0, 10) if self.server.noisy else len(text) % 11
        said = value if wish == "say" else f"It is fine.\nScore: {score}"
        usage = {"prompt_tokens": len(body), "completion_tokens": 5}
        self.server.give(hashlib.sha256(body).hexdigest(), score)
        return self.reply(200, json.dumps({"choices": [{"message": {"content": said}}], "usage": usage}).encode())

    def reply(self, status, data, headers=()):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def trickle(self):
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
        for _ in range(600):
            self.wfile.write(b"x")
            self.wfile.flush()
            time.sleep(0.05)

    def log_message(self, *about):
        pass


class JudgeServer(ThreadingHTTPServer):
    request_queue_size, daemon_threads, block_on_close = 256, True, False

    def __init__(self, port=0, log=None, *, noisy=False):
        super().__init__(("127.0.0.1", port), Answering)
        self.heard, self.busy, self.noisy, self.log, self._lock = [], set(), noisy, log, threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def give(self, content, score):
        if self.log is not None:
            with self._lock, open(self.log, "a") as file:
                file.write(f"{content} {score}\n")

    def handle_error(self, request, client_address):
        """A client that has gone is no error here."""


if __name__ == "__main__":
    port, log, *how = sys.argv[1:]
    JudgeServer(int(port), log, noisy="noisy" in how).serve_forever()
