"""Serves a checkpoint, calls it in several modes, and moves τ while the server runs."""

import argparse
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from openai import OpenAI
from openai.types.chat import ChatCompletionUserMessageParam


@contextmanager
def server(model: str) -> Iterator[str]:
    """Serve a checkpoint until the end of the block; gives the server's address."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = ["marsray", "serve", "--model", f"mine={model}", "--port", str(port)]
    process = subprocess.Popen(command)
    address = f"http://127.0.0.1:{port}"
    try:
        while not is_ready(address):
            if process.poll() is not None:
                sys.exit("the server has ended; its message is above")
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait()


def is_ready(address: str) -> bool:
    """Return whether a server can take requests."""
    try:
        return httpx.get(f"{address}/ready").is_success
    except httpx.TransportError:
        return False


def ask(client: OpenAI, question: str, **settings: object) -> None:
    """Print an answer, with a bar for each forward pass of the stream."""
    message: ChatCompletionUserMessageParam = {"role": "user", "content": question}
    events = client.chat.completions.create(
        model="mine", messages=[message], stream=True, extra_body=settings
    )
    texts = [event.choices[0].delta.content or "" for event in events if event.choices]
    print(f"{settings}: {'|'.join(text for text in texts if text)}")


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="checkpoint directory or hub id")
    parser.add_argument("--question", default="Hi there, I need help with a lost parcel today.")
    arguments = parser.parse_args()
    with server(arguments.model) as address:
        client = OpenAI(base_url=f"{address}/v1", api_key="none")
        ask(client, arguments.question, mode="ar")
        ask(client, arguments.question, mode="exact")
        ask(client, arguments.question, confidence_threshold=0.9)
        body = {"model": "mine", "confidence_threshold": 0.95}
        httpx.put(f"{address}/admin/threshold", json=body).raise_for_status()
        ask(client, arguments.question, mode="threshold")


if __name__ == "__main__":
    main()
