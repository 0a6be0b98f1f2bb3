"""A conversation of two turns. The second turn reuses the cached pages of the first.

python examples/chat.py [HOST:PORT]
"""

import sys

from baton import Client

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"

with Client(address) as client:
    messages = [("user", "What is the capital of France?")]
    answer = client.chat(messages, max_tokens=64)
    print(answer.text)

    messages += [("assistant", answer.text), ("user", "And of Italy?")]
    answer = client.chat(messages, max_tokens=64)
    print(answer.text)
    print(answer.usage)
    print(f"prefill on {answer.prefill_worker}, decode on {answer.decode_worker}")
