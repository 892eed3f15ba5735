"""KV events are everybody's prompts: no other machine gets them unless that is wanted."""

import pytest

from keepwarm.config import load
from keepwarm.errors import BadInput
from keepwarm.server.kv_events import event_publisher


@pytest.mark.parametrize(
    "address",
    ["tcp://0.0.0.0:5557", "tcp://*:5557", "tcp://eth0:5557", "tcp://[::]:5557", "epgm://lo;1:1"],
)
@pytest.mark.parametrize("token_ids", [False, True])
def test_kv_events_for_other_machines_are_refused(address, token_ids):
    wanted = {"kv_events": f"tcp://127.0.0.1:5556,{address}", "kv_events_token_ids": token_ids}
    with pytest.raises(BadInput, match="kv_events_public on a network that you trust"):
        event_publisher(None, load({}, **wanted))


def test_this_machine_is_no_other():
    made = event_publisher(None, load({}, kv_events="tcp://127.0.0.1:0,tcp://127.0.0.2:0"))
    made._context.destroy(linger=0)


def test_other_machines_get_them_where_that_is_wanted():
    made = event_publisher(None, load({}, kv_events="tcp://0.0.0.0:0", kv_events_public=True))
    made._context.destroy(linger=0)
