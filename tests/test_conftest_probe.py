import pytest
@pytest.mark.skip(reason="no reason")
def test_a(): pass
@pytest.mark.skip(reason="needs `git`")
def test_b(): pass
@pytest.mark.soak
def test_c(): assert 0
def test_d(): pass
