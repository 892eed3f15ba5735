"""Of the engine's modules only `engine.engine` knows `insight`."""

from pathlib import Path

import keepwarm.engine


def test_only_the_engine_imports_insight():
    folder = Path(keepwarm.engine.__file__).parent
    importers = [p.name for p in folder.glob("*.py") if "keepwarm.engine.insight" in p.read_text()]
    assert importers == ["engine.py"]
