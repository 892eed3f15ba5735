import json
from tests.clients.conftest import *
from tests.clients.test_shapes import *
@pytest.mark.parametrize("name", CLIENTS)
def test_p(watching, name):
    shape = shape_of(name)
    with watching(shape["calls"]) as w:
        Player(shape, w.url, CLIENTS[name]).play()
        print(name, [(t.n_new, t.receipt.recomputed, t.asked.n_tokens) for t in w.turns()])
def test_control(watching):
    shape = shape_of("claude-code"); shape["headers"]["x-keepwarm-scrub"]="none"
    with watching(shape["calls"]) as w:
        Player(shape, w.url, CLIENTS["claude-code"]).play()
        with pytest.raises(AssertionError, match="beginning"): w.turns()
