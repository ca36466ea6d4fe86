"""Settings for the zoo, which shares the means of the tests of train and of docs."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
_HERE = Path(__file__).parent
_HELPERS = [str(_HERE), str(_HERE.parent / "train"), str(_HERE.parent / "docs")]
# For the processes that the tests start, which import the helpers too.
os.environ["PYTHONPATH"] = os.pathsep.join([*_HELPERS, *filter(None, [os.environ.get("PYTHONPATH")])])
