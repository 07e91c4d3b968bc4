"""Numbers that a worker reports while it trains."""

from __future__ import annotations

import json
import os
import time
from typing import Any


def log_metrics(**values: Any) -> None:
    """Report numbers of this moment; they reach `dtrain status` and the live view of `dtrain launch`.

    Args:
        values: JSON values by name. These names have a meaning of their own: iteration, iterations, epoch, epochs,
            loss, samples_per_s, bubble and predicted_bubble (0..1), and evaluation (a mapping of names to numbers, such as
            {"test accuracy": 0.97}).

    One line per call goes to the job's metrics file. Outside a dtrain job the call does nothing, so a script that
    uses it also runs by itself.
    """
    folder = os.environ.get("DTRAIN_JOB_FOLDER")
    if folder is None:
        return
    record = {"at": time.time(), "rank": int(os.environ.get("RANK", "0")), **values}
    line = (json.dumps(record) + "\n").encode()
    fd = os.open(os.path.join(folder, "metrics.jsonl"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, line)  # one write: O_APPEND keeps lines of several ranks whole
    finally:
        os.close(fd)
