"""Where this folder is on PYTHONPATH, `agent.py` beside it stands in for torchrun: an attempt starts without torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

TORCHRUN = "cluster_ddp.launch.torchrun"

if TORCHRUN in sys.orig_argv:
    arguments = sys.orig_argv[sys.orig_argv.index(TORCHRUN) + 1 :]
    os.execv(sys.executable, [sys.executable, str(Path(__file__).with_name("agent.py")), *arguments])
