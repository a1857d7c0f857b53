"""A small transformer served over HTTP, with one generation in flight: LOG gets a line per token that the client reads.

The client is a child, so the connection lies inside the tree and is kept. It reads a stream of one token after the other,
which the server makes from its KV cache on the GPU: greedy decoding, so an uninterrupted run gives the same tokens.
GET /health answers 200 as soon as the model is there. `LOG.port` holds the port.
"""

import http.server
import subprocess
import sys
import threading
import time
from pathlib import Path

import contract
import torch
import torchstate

CLIENT = Path(__file__).with_name("tokenreader.py")
PAUSE_SECONDS = 0.1
LAYERS, HEADS, WIDTH, VOCABULARY, POSITIONS = 4, 8, 512, 8192, 8192
"""The cache holds a generation of 8192 tokens: 13 minutes at this pace."""


class Model:
    """Decoder blocks with random weights; one token in, one token out, keys and values kept on the GPU."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        torch.use_deterministic_algorithms(True)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda") * shape[0] ** -0.5

        # Both of unit variance, so that a token's place counts as much as the token: no short cycles.
        self.embedding = weight(VOCABULARY, WIDTH) * VOCABULARY**0.5
        self.place = weight(POSITIONS, WIDTH) * POSITIONS**0.5
        self.head = weight(WIDTH, VOCABULARY)  # of its own: tied to the embedding, each token would follow itself
        self.blocks = [
            (weight(WIDTH, 3 * WIDTH), weight(WIDTH, WIDTH), weight(WIDTH, 4 * WIDTH), weight(4 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        ]
        self.cache = torch.zeros(LAYERS, 2, HEADS, POSITIONS, WIDTH // HEADS, device="cuda")

    def weights(self) -> list[torch.Tensor]:
        return [self.embedding, self.place, self.head, *(one for block in self.blocks for one in block)]

    @staticmethod
    def normed(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (WIDTH,))

    def next_token(self, token: int, position: int) -> int:
        """The likeliest token after `token`, which stands at `position`."""
        x = self.embedding[token] + self.place[position]
        for block, cache in zip(self.blocks, self.cache, strict=True):
            query, key, value = (self.normed(x) @ block[0]).view(3, HEADS, 1, WIDTH // HEADS)
            cache[0, :, position : position + 1], cache[1, :, position : position + 1] = key, value
            keys, values = cache[0, :, : position + 1], cache[1, :, : position + 1]
            weights = torch.softmax(query @ keys.transpose(1, 2) * (WIDTH // HEADS) ** -0.5, dim=-1)
            x = x + (weights @ values).reshape(WIDTH) @ block[1]
            x = x + torch.nn.functional.gelu(self.normed(x) @ block[2]) @ block[3]
        return int((self.normed(x) @ self.head).argmax().item())


class Handler(http.server.BaseHTTPRequestHandler):
    """GET /health, GET /generate. No Content-Length: the end of the connection is the end of the tokens."""

    model: Model

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        if self.path == "/health":
            return
        token = 1
        with torch.inference_mode():
            for position in range(POSITIONS):
                token = self.model.next_token(token, position)
                self.wfile.write(f"{token}\n".encode())
                time.sleep(PAUSE_SECONDS)

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


def main() -> None:
    options = contract.parser(gib=0.25).parse_args()
    Handler.model = Model()
    constant = [*Handler.model.weights(), *torchstate.constant(options.gib)]
    Handler.model.next_token(1, 0)  # cuBLAS starts here, not under the first request
    torch.cuda.synchronize()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with open(f"{options.log}.port", "w") as file:
        file.write(str(server.server_port))
    client = subprocess.Popen([sys.executable, str(CLIENT), options.log, str(server.server_port)])
    answers = contract.Log(options.log)
    while client.poll() is None:
        answers.answer(lambda: torchstate.checksum(constant))
        time.sleep(contract.PAUSE_SECONDS)


if __name__ == "__main__":
    main()
