"""The client of transformer.py: tokenreader.py LOG PORT. One request, one line of the log for each token that comes."""

import http.client
import sys

import contract


def main(log_path: str, port: int) -> None:
    log = contract.Log(log_path)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("GET", "/generate")
    answer = connection.getresponse()
    while line := answer.readline():
        log.step(line.decode().strip())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
