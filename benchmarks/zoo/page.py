"""The results as a page of Markdown: `docs/results/architectures.md`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.resources import files

from benchmarks.zoo.findings import EXACT, EXACT_IN_BATCH, UNTOLD, Findings, Results
from keepwarm.engine.padding import MAX_APART_16, MAX_APART_32

REUSES = (
    *("again", "next turn", "fork", "rewind", "rewind again"),
    *("new process", "new process, next turn"),
)
FLOORS = {"float32": MAX_APART_32, "bfloat16": MAX_APART_16}
COUNTED = ("exact", "drifts", UNTOLD, "WRONG", "CRASH", "BLIND")


def page(results: Results, on_cuda: Results) -> str:
    text = files(__package__).joinpath("page.md").read_text()
    in_32, in_16 = ({one.name: one for one in results.of(dtype)} for dtype in EXACT)
    ran = [one for one in in_32.values() if not one.left_out]
    return text.format(
        version=results.machine["versions"]["mlx-lm"],
        machine=_machine(results),
        date=results.date,
        command=results.command,
        exact=EXACT["float32"],
        exact_16=EXACT["bfloat16"],
        in_batch=EXACT_IN_BATCH,
        summary=summary(results),
        rows="".join(_row(one, in_16.get(one.name)) for one in ran),
        drifting=_drifting(results),
        left_out=_left_out(in_32.values()),
        only_32=_left_out(in_16.get(one.name, _untried(one.name)) for one in ran),
        padding="".join(_padding_row(results.of(dtype), dtype) for dtype in EXACT),
        padded_wrong=_padded_wrong(results),
        cuda_device=on_cuda.machine["device"],
        cuda_date=on_cuda.date,
        cuda_command=on_cuda.command,
        cuda_summary=_counts(on_cuda.of("float32"), "float32"),
    )


def summary(results: Results) -> str:
    return "".join(_counts(results.of(dtype), dtype) for dtype in EXACT)


def _counts(findings: Sequence[Findings], dtype: str) -> str:
    ran = [one for one in findings if not one.left_out]
    verdicts = [one.verdict.split(":")[0] for one in ran]
    counts = [
        f"{len(ran)} of {len(findings)} types run here",
        *(f"{verdicts.count(verdict)} {verdict}" for verdict in COUNTED),
        f"{sum(bool(one.batched) for one in ran)} batched",
        f"{sum(one.quantised == 'yes' for one in ran)} with 8 bits",
    ]
    bad = [f"  - {one.name}: {one.verdict}\n" for one in ran if one.is_bad]
    return f"- {dtype}: {', '.join(counts)}.\n{''.join(bad)}"


def _machine(results: Results) -> str:
    machine = results.machine
    blas = machine["blas"] or "MLX's own"
    return f"{machine['n_cpus']} cores of {machine['architecture']}, BLAS: {blas}"


def _untried(name: str) -> Findings:
    return Findings(name, "bfloat16", left_out="not tried yet")


def _row(in_32: Findings, in_16: Findings | None) -> str:
    reused = [_share(in_32, trial) for trial in REUSES]
    other = "" if in_16 is None or in_16.left_out else in_16.verdict
    return _line(
        f"`{in_32.name}`",
        in_32.verdict,
        other,
        in_32.caches,
        *reused,
        f"alone: {in_32.alone}" if in_32.alone else "yes",
        in_32.quantised,
    )


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def _share(one: Findings, trial: str) -> str:
    if trial not in one.reused:
        return ""
    n_reused, n_known = one.reused[trial]
    return "all" if n_reused == n_known else f"{n_reused} of {n_known}"


def _left_out(findings: Iterable[Findings]) -> str:
    """Types by the reason for which they did not run."""
    names: dict[str, list[str]] = {}
    for one in findings:
        if one.left_out:
            names.setdefault(one.left_out, []).append(f"`{one.name}`")
    return "".join(_line(why.replace("|", "/"), ", ".join(of_it)) for why, of_it in names.items())


def _drifting(results: Results) -> str:
    rows = [
        _line(f"`{one.name}`", one.dtype, *(f"{x:.2g}" for x in _distances(one)))
        for one in results.findings
        if one.verdict.startswith("drifts")
    ]
    return "".join(sorted(rows))


def _distances(one: Findings) -> tuple[float, float, float]:
    return one.drift, max(one.apart.values()), one.control


def padded_apart(findings: Iterable[Findings], shares: bool) -> list[float]:
    """How far padded rows were from single ones, of the types that share batches or do not."""
    return sorted(
        one.padding.padded for one in findings if one.padding and one.padding.shares is shares
    )


def _padding_row(findings: Sequence[Findings], dtype: str) -> str:
    right, wrong = padded_apart(findings, True), padded_apart(findings, False)
    return _line(
        dtype,
        str(len(right)),
        f"{max(right, default=0):.2g}",
        f"{FLOORS[dtype]:g}",
        f"{min(wrong, default=0):.2g}",
        str(len(wrong)),
    )


def _padded_wrong(results: Results) -> str:
    rows = [
        _line(f"`{one.name}`", one.dtype, f"{one.padding.padded:.2g}", str(one.padding.n_tokens))
        for one in results.findings
        if one.padding and not one.padding.shares
    ]
    return "".join(sorted(rows))
