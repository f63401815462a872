"""Runs the null server: `python -m millrace.bench.null_server.__main__ TIMING [grpc]`."""

import asyncio
import json
import sys

from millrace.bench.null_server.http import HOST, NullServer
from millrace.bench.null_server.ledger import Ledger, NullTiming


async def _serve(timing: NullTiming, over_grpc: bool) -> None:
    """Serve until stdin ends, which it does with the parent process; print the addresses in one line."""
    ledger = Ledger(timing)
    server = await NullServer(ledger).start()
    address = f"http://{HOST}:{server.sockets[0].getsockname()[1]}"
    if over_grpc:
        from millrace.bench.null_server.grpc import started  # an extra: only where it is asked for

        address += f" {HOST}:{await started(ledger, HOST)}"
    sys.stdout.write(address + "\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(NullTiming(**json.loads(sys.argv[1])), over_grpc="grpc" in sys.argv[2:]))
