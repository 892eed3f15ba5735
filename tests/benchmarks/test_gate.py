"""The gate on transcripts: it gains where answers repeat what was read, and loses little."""

from mlx_lm.tokenizer_utils import load

from benchmarks import gate


def played(curve, transcript, n_messages, replays=False):
    device = gate.Device(gate.CURVES[curve], replays=replays)
    tokenizer = load(gate.HERE / "models/attention")
    gate.play(device, gate.read(transcript)[:n_messages], tokenizer, own=False)
    return {kind: spent.n_tokens / spent.seconds for kind, spent in device.spent.items()}


def test_files_that_are_written_back_come_faster():
    assert played("CPU", "writes", 15)["write"] > 1.4


def test_prose_is_no_slower_than_without_drafts_and_so_is_all_where_they_cannot_pay():
    """Of a few thousand tokens, of which eight plain steps may be lost at once."""
    assert played("CPU", "prose", 40)["prose"] > 0.97
    assert min(played("M1", "writes", 25).values()) > 0.96
    assert min(played("M1", "writes", 25, replays=True).values()) > 0.96


def test_a_goal_that_is_missed_is_said():
    assert gate.missed({"M1": {"edit": {"times": 0.99}}, "CPU": {"tool": {"times": 1.4}}}) == []
    found = gate.missed({"M1": {"edit": {"times": 0.97}}, "CPU": {"tool": {"times": 1.3}}})
    assert found == ["M1, edit: 0.97", "CPU, tool: 1.3"]
