"""A worker of the fault matrix: it prints numbered lines, has below it all that outlives a careless stop, and does what a file says.

It runs on a node, from the job's own tree, and needs no torch.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

SLEEP = ("sleep", "600")
ORDER = "do"  # a file of Python beside this one: what to do next


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deaf", action="store_true", help="ignore TERM")
    parser.add_argument("--last-word", type=int, help="end with this code when told to end")
    parser.add_argument("--respawn", action="store_true", help="rank 1 has processes that fork themselves and end, for ever")
    parser.add_argument("--no-clean-daemon", action="store_true", help="have no daemon with an empty environment")
    parser.add_argument("--fails-at-once", action="store_true", help="rank 1 ends with 7 before it has begun")
    parser.add_argument("--alone", action="store_true", help="have no process below")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    if options.fails_at_once and rank == 1:
        print("no line", flush=True)
        sys.exit(7)
    if not options.alone:
        grow_tree(with_clean_daemon=not options.no_clean_daemon)
    if options.respawn and rank == 1:
        for own_group in (False, True):
            if os.fork() == 0:
                respawn(own_group)
    if options.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.last_word is not None:
        signal.signal(signal.SIGTERM, lambda number, stack: os._exit(options.last_word))
    print("ready", flush=True)
    for number in itertools.count(1):
        print("\n".join(lines(number, rank)), flush=True)
        if os.path.exists(ORDER):
            with open(ORDER) as file:
                exec(compile(file.read(), ORDER, "exec"))
        time.sleep(0.01)


def lines(number: int, rank: int) -> list[str]:
    return [f"line {number:07d}.{part} of rank {rank}" for part in range(10)]


def grow_tree(*, with_clean_daemon: bool) -> None:
    """A child, one in a session of its own, one that ignores TERM, daemons, and processes like those of a DataLoader."""
    subprocess.Popen(SLEEP)
    subprocess.Popen(SLEEP, start_new_session=True)
    subprocess.Popen(("sh", "-c", "trap '' HUP INT TERM; exec sleep 600"))
    become_daemon(dict(os.environ))
    if with_clean_daemon:
        become_daemon({})
    for _ in range(2):
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True).start()


def become_daemon(environ: dict[str, str]) -> None:
    """Leave a process behind that has no parent, a session of its own and this environment."""
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            os.chdir("/")
            os.execve("/bin/sleep", SLEEP, environ)
        os._exit(0)
    os.waitpid(child, 0)


def respawn(own_group: bool) -> None:
    """Live for 1 to 10 ms, then go on as a child of what has ended by then."""
    while True:
        if own_group:
            os.setpgid(0, 0)
        time.sleep(random.uniform(0.001, 0.01))
        if os.fork() > 0:
            os._exit(0)


if __name__ == "__main__":
    main()
