"""The smallest client: `pip install pyzmq msgpack`, nothing of VRAM Conductor (protocol/SPEC.md).

python examples/minimal_client.py ENDPOINT [MODEL]     (`conductor up` prints the endpoint)
"""

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import zmq

PREAMBLE, HEARTBEAT_S, SILENCE_S = b"VMC\x01", 2, 10


class Client:
    def __init__(self, endpoint: str) -> None:
        self.socket = zmq.Context().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 500)
        self.socket.connect(endpoint)
        self.heard = self.sent = time.monotonic()

    def send(self, kind: str, **fields: Any) -> bytes:
        """Send a message; its request id comes back in every answer to it."""
        rid = os.urandom(16)
        self.socket.send_multipart([PREAMBLE, msgpack.packb({"t": kind, "rid": rid, **fields})])
        self.sent = time.monotonic()
        return rid

    def answers(self, rid: bytes | None = None) -> Iterator[dict[str, Any]]:
        """The messages that answer ``rid`` (None: any), with heartbeats in between."""
        while time.monotonic() - self.heard < SILENCE_S:
            if time.monotonic() - self.sent > HEARTBEAT_S:
                self.send("PING")
            if self.socket.poll(500):
                message = msgpack.unpackb(self.socket.recv_multipart()[1])
                self.heard = time.monotonic()
                if message["t"] == "ERROR":
                    sys.exit(f"{message['error']['reason']}: {message['error']['message']}")
                if rid in (None, message.get("rid")):
                    yield message
        sys.exit("no answer: is the broker running?")


client = Client(sys.argv[1]) if "://" in "".join(sys.argv[1:2]) else sys.exit(__doc__)
client.send("HELLO", v=[1, 0], client="minimal")
next(message for message in client.answers() if message["t"] == "WELCOME")
model = sys.argv[2] if len(sys.argv) > 2 else "smollm2-135m"
rid = client.send("REGISTER", agent="minimal", model=model, ephemeral=True)
next(message for message in client.answers(rid) if message["t"] == "OK")
rid = client.send("DECODE", agent="minimal", prompt="The sea is", max_tokens=48)
for message in client.answers(rid):
    if message["t"] == "TOKENS":
        print(message["text"], end="", flush=True)
    elif message["t"] == "DONE":
        print(f"\n{message['usage']}")
        break
client.send("BYE")
