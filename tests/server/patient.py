"""`keepwarm serve` with deadlines that a busy machine keeps too.

python -m tests.server.patient CHECKPOINT
"""

from __future__ import annotations

import sys
from unittest.mock import patch

from keepwarm.cli.main import main

SOON = 60.0  # seconds
DEADLINES = (
    "keepwarm.remote.opening.START_S",
    "keepwarm.remote.tier.ASK_S",
    "keepwarm.remote.tier.ANSWERS_S",
    "keepwarm.remote.tier.MAX_ASK_SHARE",
    "keepwarm.cache.restore.restorer.MIN_READ_S",
    "keepwarm.remote.tier.MIN_READ_S",
)

if __name__ == "__main__":
    for name in DEADLINES:
        patch(name, SOON).start()
    patch("keepwarm.remote.health.RemoteSpeed.load_s", lambda *_: 0.0).start()
    sys.argv = ["keepwarm", "serve", "--port", "0", "--model", sys.argv[1]]
    main()
