"""Make the golden sealed store of format version 1 with the code that runs this script.

    python tests/data/format/v1/make_sealed.py      (writes `sealed/` beside itself)

Only for a version that has not been released. The key is 32 bytes that count up from 0; the store
holds the record that `make_golden.py` calls `delta`, under an agent called `golden`.
"""

import shutil
from base64 import b64encode
from pathlib import Path

from make_golden import NAMESPACE, PROMPT, RECORDS, record

from keepwarm.agents.agent_store import AgentStore
from keepwarm.store.disk.disk import DiskLimits

if __name__ == "__main__":
    place = Path(__file__).parent / "sealed"
    shutil.rmtree(place, ignore_errors=True)
    key = b64encode(bytes(range(32))).decode()
    with AgentStore(place, DiskLimits(min_free_bytes=0), secret=key) as disk_store:
        made = record(*RECORDS["delta"])
        disk_store.disk.put(made).durable.result()
        disk_store.agents.advance("golden", NAMESPACE, PROMPT[:256])
    for name in ("tmp", "quarantine", "index.sqlite"):
        path = place / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
