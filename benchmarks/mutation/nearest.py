"""Which test files a mutant meets, and in which order."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.mutation.sites import Mutant


class Suite:
    """The test files of a checkout."""

    def __init__(self, root: Path) -> None:
        files = sorted((root / "tests").rglob("test_*.py"))
        self._texts = {file.relative_to(root): file.read_text() for file in files}

    def nearest(self, mutant: Mutant) -> list[str]:
        """Those of the mirrored folder, then others that import the module.

        In either group those come first that are named as the module, then those that name the
        function or its class, import the module and lie in the same sub-folder.
        """
        _, *folders, stem = mutant.module.split(".")
        room = folders[0] if folders else stem
        package = mutant.module.rpartition(".")[0]
        imports = re.compile(rf"{mutant.module}\b|from {package} import [^\n]*\b{stem}\b")
        names = re.compile(rf"\b{mutant.function.split('.')[0]}\b")
        ranked = []
        for file, text in self._texts.items():
            mirrored, imported = file.parts[1] == room, bool(imports.search(text))
            if mirrored or imported:
                named = stem in (file.stem.removeprefix("test_"), file.parent.name)
                beside = list(file.parts[1:-1]) == folders
                points = 4 * named + 2 * bool(names.search(text)) + 2 * imported + beside
                ranked.append((not mirrored, -points, len(text), str(file)))
        return [file for *_, file in sorted(ranked)]
