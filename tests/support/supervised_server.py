"""A parent process for tests: starts one worker, prints its pid and its own child's, and waits to be killed."""

import asyncio
import sys
from pathlib import Path

from server.engines.remote import Timeouts
from server.processes import LogFile
from server.supervisor import worker_engine


async def main(folder: Path) -> None:
    engine = worker_engine("scripted", b"{}", run_folder=folder / "run", log_file=LogFile(folder / "engine.log"), timeouts=Timeouts(start_s=60))
    await engine.start(lambda message: None)
    print(engine.pid, flush=True)
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
