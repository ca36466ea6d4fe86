"""The first process of a virtual host: sets the host up, then stays as its process number 1.

Called by `virtual_hosts.Host.start` inside fresh namespaces with the host's name, its hosts file and its folder /run.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys


def main(name: str, hosts_file: str, run: str) -> None:
    socket.sethostname(name)
    for command in (
        ["mount", "--bind", hosts_file, "/etc/hosts"],
        # A Slurm that signs with a key of its own has its sockets there, in places that nothing can change.
        ["mount", "--bind", run, "/run"],
        ["mount", "-t", "tmpfs", "shm", "/dev/shm"],
        ["ip", "link", "set", "lo", "up"],
    ):
        subprocess.run(command, check=True, timeout=30)
    # Ignored, SIGCHLD makes the kernel bury the orphans that process 1 inherits.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.write(1, b"ready\n")
    while True:
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
