"""The load of `overhead`: many SSE streams from one process that does as little per token as it can.

Prints one JSON object: {"sent": monotonic seconds, "bins": {tenth of a second since boot: tokens}, "bad": streams that failed}.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter


async def _stream(host: str, port: int, path: str, body: bytes, bins: Counter[int]) -> bool:
    """Counts the `data:` lines as they come. True when the answer was complete."""
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    tail, ok = b"", b""
    while b"[DONE]" not in tail:
        piece = await reader.read(65536)
        if not piece:
            break
        ok = ok or piece[:12]
        bins[int(time.monotonic() * 10)] += (tail[-5:] + piece).count(b"data: ")
        tail = (tail + piece)[-64:]
    writer.close()
    return ok == b"HTTP/1.1 200" and b"[DONE]" in tail


async def main(port: int, path: str, body: bytes, streams: int) -> None:
    bins: Counter[int] = Counter()
    sent_s = time.monotonic()
    complete = await asyncio.gather(*(_stream("127.0.0.1", port, path, body, bins) for _ in range(streams)))
    print(json.dumps({"sent": sent_s, "bins": bins, "bad": complete.count(False)}))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3].encode(), int(sys.argv[4])))
