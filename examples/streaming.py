"""Prints an answer as it is generated (asyncio).

python examples/streaming.py [HOST:PORT]
"""

import asyncio
import sys

from baton import AsyncClient


async def main(address: str) -> None:
    async with AsyncClient(address) as client:
        # Leaving the block early, or cancelling the task, stops the work on every worker.
        async with client.stream("Once upon a time", max_tokens=48, temperature=0.8) as stream:
            async for delta in stream:
                print(delta.text, end="", flush=True)
        print(f"\nThis seed gives the same answer again: {stream.answer.seed}")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))
