"""Stands in for the LMCache daemon in tests: answers GET /healthcheck on a port. Files in the folder switch its faults:
`sick` (answers 503) and `refuse` (exits at once)."""

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

port, folder = int(sys.argv[1]), Path(sys.argv[2])
if (folder / "refuse").exists():
    sys.exit("refused to start")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/healthcheck" and not (folder / "sick").exists() else 503)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


HTTPServer(("127.0.0.1", port), Handler).serve_forever()
