"""Temporary credentials of the tests' S3 server, as a process, a container's endpoint or a file gives them to boto3."""

import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from object_store import IDENTITIES


class Answer(BaseHTTPRequestHandler):
    """What a container's credentials endpoint says."""

    def do_GET(self) -> None:
        body = self.server.keys.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


class Keys:
    """The credentials of this machine, in a file that boto3 comes to by `way`: process, endpoint or file.

    environment: what leads there; AWS_ACCESS_KEY_ID must not be set.
    """

    def __init__(self, way: str, folder: Path) -> None:
        self.way, self.file = way, folder / "keys"
        environment = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
        environment |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
        if way == "file":
            environment["AWS_SHARED_CREDENTIALS_FILE"] = str(self.file)
        elif way == "process":
            environment["AWS_CONFIG_FILE"] = str(folder / "config")
            (folder / "config").write_text(f"[default]\ncredential_process = cat {self.file}\n")
        else:
            server = HTTPServer(("127.0.0.1", 0), Answer)
            server.keys = self.file
            threading.Thread(target=server.serve_forever, daemon=True).start()
            environment["AWS_CONTAINER_CREDENTIALS_FULL_URI"] = f"http://127.0.0.1:{server.server_port}/keys"
        self.environment = environment

    def are(self, identity: str, seconds: float = 60.0) -> None:
        """Of this identity, for so long."""
        key, secret, _ = IDENTITIES[identity]
        until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))
        text = json.dumps(
            {"Version": 1, "AccessKeyId": key, "SecretAccessKey": secret, "Token": "", "Expiration": until}
        )
        if self.way == "file":
            text = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
        written = self.file.with_suffix(".new")
        written.write_text(text)
        written.replace(self.file)
